"""What a built-in agent says on the board, from what it measured: answers, values that won, questions about its ideas.

Nothing is said that changes nobody's next proposal (see `heard.py` for what is made of it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from optimizer.agents.base import Desk, SearchView, Tried
from optimizer.agents.heard import Heard, parsed, spelled
from optimizer.agents.programs.edit import parts
from optimizer.agents.programs.program import Program
from optimizer.records import MEASURED, Candidate, Experiment, Post, State

SHOWN_SLOTS = 3  # regions that an answer names


class Voice:
    """`ideas` are the part lists that the agent tries by themselves."""

    def __init__(self, name: str, focus: str, ideas: Collection[tuple[str, ...]], heard: Heard) -> None:
        self.name, self.focus, self.heard = name, focus, heard
        self.ideas = {Program.of(idea).parts for idea in ideas}
        self.desk = Desk()
        self.results: dict[Program, Tried] = {}  # of all agents, the highest tier of each
        self.news: list[Tried] = []  # own results that were not spoken of yet

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        program = parsed(candidate.name)
        if program is None or experiment.state not in MEASURED:
            return
        held = self.results.get(program)
        if held is None or experiment.tier >= held.experiment.tier:
            self.results[program] = Tried(candidate, experiment)
            if candidate.agent == self.name:
                self.news.append(self.results[program])

    def talk(self, view: SearchView) -> None:
        """Answers what it was asked, says which values won, then asks one question."""
        self.heard.read(view.posts)
        for question in list(self.heard.questions.values()):
            self._answer(question)
        for tried in self.news:
            self._tell_value(tried)
        self.news.clear()
        self._ask(view)

    # answers

    def _answer(self, question: Post) -> None:
        best = self.best()
        asked = [name for name in question.data["parts"] if name in parts()]
        inside = best is not None and set(asked) <= set(best.parts)
        room = best is not None and not inside and best.fits(*asked)
        data = {"program": best.name if best else "", "contains": inside, "room": room}
        text = self._said_of(best, asked, inside, room)
        artifact = self.results[best].candidate.artifact_hash if best else ""
        self.desk.post(self.name, "answer", text, artifact, question.id, data=data)
        self.heard.questions.pop(question.id, None)

    def _said_of(self, best: Program | None, asked: list[str], inside: bool, room: bool) -> str:
        if best is None:
            return "None of my programs is surely faster than the baseline."
        text = f"My best is {best.name}, {speed(self.results[best].experiment)}."
        if inside:
            return f"{text} It holds {spelled(asked)} already{self._without(best, asked)}."
        if room:
            return f"{text} {spelled(asked)} is not in it and fits beside what is there: try it on top."
        taken = {slot for part in best.chosen if part.name not in asked for slot in part.slots}
        shared = sorted({slot for name in asked if name not in best.parts for slot in parts()[name].slots} & taken)
        return f"{text} It does {', '.join(shared[:SHOWN_SLOTS])} in its own way: {spelled(asked)} has no place in it."

    def _without(self, best: Program, asked: list[str]) -> str:
        """What the best program was without those parts, where that was measured."""
        rest = [p for p in self.results if set(p.parts) == set(best.parts) - set(asked) and p.values == best.values]
        return f"; without it {speed(self.results[rest[0]].experiment)}" if rest else ""

    def best(self) -> Program | None:
        """The fastest of its own programs that is surely faster than the baseline."""
        own = [
            (t.experiment.tier, t.experiment.ratio or 0.0, p.name, p) for p, t in self.results.items() if self._won(t)
        ]
        return max(own)[-1] if own else None

    def _won(self, tried: Tried) -> bool:
        return tried.candidate.agent == self.name and (tried.experiment.ci_low or 0.0) > 1.0

    # insights

    def _tell_value(self, tried: Tried) -> None:
        """A parameter's value that surely beat the same program without it is for all who have that parameter."""
        program = Program.parse(tried.candidate.name)
        for key, value in program.parameters.items():
            without = Program(program.parts, tuple(v for v in program.values if v[0] != key))
            before = self.results.get(without)
            if before is None or (key, value) in self.heard.said or without.precision != program.precision:
                continue
            if gain := sure_gain(tried.experiment, before.experiment):
                text = f"{key} = {value} made {without.name} {gain:.2f}x as fast. Who has {key} can start from it."
                data = {"parameter": key, "value": value, "gain": gain, "program": program.name}
                self.desk.post(self.name, "insight", text, tried.candidate.artifact_hash, data=data)
                self.heard.said.add((key, value))

    # questions

    def _ask(self, view: SearchView) -> None:
        """About an idea that made no sure difference by itself: whether the best program of another focus has room for it,
        where what it speeds up is a larger share.
        """
        other = self._leader(view)
        idea = next(self._unsure(), None)
        if other is None or idea is None:
            return
        program, tried = idea
        text = (
            f"{other.candidate.agent}, {program.name} by itself made no sure difference: {speed(tried.experiment)}. "
            "Does your best program do that already, or has it room for it?"
        )
        data = {"to": other.candidate.agent, "program": spelled(program.parts), "parts": list(program.parts)}
        self.desk.post(self.name, "question", text, tried.candidate.artifact_hash, data=data)
        self.heard.asked[data["program"]] = Post("", self.name, "question", text, data=data)  # until it is read

    def _unsure(self) -> Iterator[tuple[Program, Tried]]:
        for program, tried in self.results.items():
            low, high = tried.experiment.ci_low or 0.0, tried.experiment.ci_high or 0.0
            alone = program.parts in self.ideas and not program.settings and program.precision == "same"
            mine = tried.candidate.agent == self.name and spelled(program.parts) not in self.heard.asked
            settled = tried.experiment.state is not State.RETEST or tried.experiment.visit > 1
            if mine and alone and settled and low <= 1.0 <= high:
                yield program, tried

    def _leader(self, view: SearchView) -> Tried | None:
        """The fastest of the other foci whose agent can say what is in it."""
        others = [
            t for focus, t in view.best.items()
            if focus != self.focus and t.candidate.agent != self.name and parsed(t.candidate.name)
            and (t.experiment.ci_low or 0.0) > 1.0
        ]  # fmt: skip
        return max(others, key=lambda t: (t.experiment.tier, t.experiment.ratio or 0.0), default=None)


def sure_gain(after: Experiment, before: Experiment) -> float:
    """How many times faster, when that is sure: the two were timed against each other, or their intervals lie apart. Else 0."""
    if after.against == before.artifact_hash:
        return (after.paired or 0.0) if (after.paired_low or 0.0) > 1.0 else 0.0
    if after.tier != before.tier or not before.ratio or (after.ci_low or 0.0) <= (before.ci_high or 0.0):
        return 0.0
    return (after.ratio or 0.0) / before.ratio


def speed(experiment: Experiment) -> str:
    low, high = experiment.ci_low or 0.0, experiment.ci_high or 0.0
    return f"{experiment.ratio or 0.0:.2f}x the baseline ({low:.2f} to {high:.2f}, tier {experiment.tier})"
