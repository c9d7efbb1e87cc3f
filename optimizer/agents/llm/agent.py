"""An agent whose programs a language model writes. It thinks for long: the search asks it from a thread of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from statistics import median
from typing import Any

from engine.artifacts import baseline_files
from engine.models.structure import baseline_of
from kernels.precision import exact
from optimizer.agents.base import Desk, SearchView, Tried
from optimizer.agents.llm.answer import PRECISIONS, Allowed, Answer, Base, read_answer
from optimizer.agents.llm.check import AnswerError
from optimizer.agents.llm.client import Client
from optimizer.agents.llm.faults import Fault, Stopped
from optimizer.agents.llm.prompt import Own, build_prompt, fits, outcome, repair, worth
from optimizer.agents.llm.purse import CapReached, Purse
from optimizer.agents.llm.settings import LlmSettings
from optimizer.agents.programs.program import Program, ProgramError
from optimizer.config import FOCI
from optimizer.records import MEASURED, Candidate, Experiment, Proposal

TURNS = 2  # of one thought: an answer, and one repair of it
SETBACKS = 4  # thoughts in a row that may bring nothing before the agent leaves
LEAST_ROOM = 6000  # tokens of a prompt, below which a shorter one says too little
TRUST = 0.5  # of what a model expects, before any of it was measured


class LlmAgent:
    """One voice of a run's model. Several share a purse, and begin each with another focus."""

    thinks = True
    focus = ""  # each proposal says its own

    def __init__(
        self, number: int, settings: LlmSettings, purse: Purse, foci: Collection[str] = (), pause_s: float = 1.0
    ) -> None:
        self.name = f"llm-{number}"
        self.number, self.settings, self.purse = number, settings, purse
        self.foci = tuple(f for f in FOCI if not foci or f in foci)
        self.desk = Desk()
        self.client = Client(self.name, settings, purse, lambda: self.desk.stopped(), pause_s)
        self.left = ""  # why it stopped
        self._room = settings.context_tokens - settings.answer_tokens
        self._setbacks = 0
        self._made: dict[str, Answer] = {}  # what it proposed, by the proposal's name
        self._told: dict[str, Tried] = {}
        self._notes: list[Own] = []  # answers that came to nothing

    def sit(self, desk: Desk) -> None:
        """Takes its place in a search: what earlier attempts used up counts."""
        self.desk, self.purse.on_change = desk, desk.usage
        mine = {agent: row for agent, row in desk.used.items() if agent not in self.purse.by_agent}
        self.purse.restore(mine)

    def propose(self, view: SearchView) -> Proposal | None:
        """None when the model had nothing that can be tried, or the agent has left; then `left` says why."""
        if self.left or self.desk.stopped():
            return None
        try:
            return self._think(view)
        except Stopped:
            return None
        except CapReached as cap:
            self._leave(f"The cap of this run is reached: {cap} I stop here; what I proposed stays.")
        except Fault as fault:
            self._failed(fault)
        return None

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        if candidate.agent == self.name:
            self._told[candidate.name] = Tried(candidate, experiment)

    def limits(self, view: SearchView) -> list[str]:
        return [f"{self.name} asks {self.settings.model} at {self.settings.host}: at most {self.settings.caps} a run."]

    # one thought

    def _think(self, view: SearchView) -> Proposal | None:
        self._see_refused(view)
        base, allowed = self._base(view), self._allowed(view)
        messages = build_prompt(view, base, allowed, self._room, self._own(), self._focus(view))
        for turn in range(TURNS):
            reply = self.client.ask(messages)
            try:
                answer = read_answer(reply.text, base, allowed)
                self._check_new(answer, view)
            except AnswerError as error:
                self.purse.failed(self.name, error.kind)
                messages = [*messages, {"role": "assistant", "content": reply.text}, repair(error, reply.cut)]
                if turn == TURNS - 1:
                    self._notes.append(Own("an answer", f"could not be tried: {str(error)[:300]}"))
                    self._setback(f"{self.settings.model} gave no program that can be tried: {error}")
            else:
                self._setbacks = 0
                self._say(answer, view)
                return self._proposal(answer, base, view)
        return None

    def _say(self, answer: Answer, view: SearchView) -> None:
        """What the model wants to know, and what it says to questions of others; each question is answered once by it."""
        if answer.question:
            self.desk.post(self.name, "question", answer.question)
        open_ones = {p.id for p in view.posts if p.kind == "question" and p.agent != self.name}
        open_ones -= {p.reply_to for p in view.posts if p.kind == "answer" and p.agent == self.name}
        for question, text in answer.answers.items():
            if question in open_ones:
                self.desk.post(self.name, "answer", text, reply_to=question)

    def _base(self, view: SearchView) -> Base:
        """The best program so far, or the baseline when there is none or it does not fit."""
        best = view.incumbent
        if best and view.incumbent_files:
            settings, precision = self._declared(best.name)
            base = Base(dict(view.incumbent_files), best.name, settings, best.artifact_hash, precision)
            if fits(base, self._room):
                return base
        name = f"the baseline ({best.name} is the best so far, and too long to show)" if best else "the baseline"
        return Base(baseline_files(baseline_of(view.config)), name)

    def _declared(self, name: str) -> tuple[dict[str, Any], str]:
        """Settings and precision of a program: the agent's own, or a built-in one's, which its name says."""
        if name in self._made:
            return self._made[name].settings, self._made[name].precision
        try:
            program = Program.parse(name)
        except ProgramError:  # another model's, or of an earlier attempt
            return {}, "same"
        return program.settings, program.precision

    def _allowed(self, view: SearchView) -> Allowed:
        precisions = tuple(p for p in PRECISIONS if exact(p) or view.tolerance == "quantised")
        return Allowed(self.foci, precisions, view.machine.has_compiler)

    def _focus(self, view: SearchView) -> str:
        """The focus with the most room; the second agent begins with the next, and each moves on with what it tried."""
        ordered = sorted(self.foci, key=lambda f: -worth(view, f))
        return ordered[(self.number - 1 + len(self._made)) % len(ordered)]

    def _own(self) -> list[Own]:
        tried = [Own(t.candidate.name, outcome(t)) for t in list(self._told.values())]  # another thread tells
        waiting = [Own(name, "not measured yet") for name in self._made if name not in self._told]
        return [*self._notes[-3:], *waiting, *tried]

    def _check_new(self, answer: Answer, view: SearchView) -> None:
        """Raises AnswerError, with what became of it, for a program that was tried or proposed."""
        known = next((t for t in view.experiments if t.candidate.source_hash == answer.source_hash), None)
        if known is not None:
            text = f"It is the same program as {known.candidate.name}, but for numbers and names. That one: {outcome(known)}"
            raise AnswerError(text, "duplicate")
        if answer.source_hash in view.tried or any(m.source_hash == answer.source_hash for m in self._made.values()):
            raise AnswerError("It is the same program as one that was proposed before, but for numbers.", "duplicate")

    def _see_refused(self, view: SearchView) -> None:
        """What the board refused never came to be a proposal of the run: someone else had it."""
        for name in [n for n in self._made if n not in view.proposed and n not in self._told]:
            self._notes.append(Own(name, "refused: another agent proposed that program, or works on it"))
            self.purse.failed(self.name, "duplicate")
            del self._made[name]

    def _proposal(self, answer: Answer, base: Base, view: SearchView) -> Proposal:
        name = self._unused(f"{self.name}: {answer.name}", view)
        self._made[name] = answer
        text = "".join(part for item in sorted(answer.files.items()) for part in item) + repr(
            sorted(answer.settings.items())
        )
        return Proposal(
            id=f"{self.name}-{hashlib.sha256(f'{name}{text}'.encode()).hexdigest()[:12]}",
            agent=self.name,
            focus=answer.focus,
            name=name,
            hypothesis=answer.hypothesis,
            mechanism=answer.mechanism,
            files=answer.files,
            settings=answer.settings,
            precision=answer.precision,
            expected=self._believed(answer.expected),
            parent=base.parent,
        )

    def _unused(self, name: str, view: SearchView) -> str:
        taken = {*view.proposed, *self._made, *list(self._told)}
        return next(n for n in (name, *(f"{name} {i}" for i in range(2, len(taken) + 3))) if n not in taken)

    def _believed(self, expected: float) -> float:
        """What the model expects, as far as its programs kept what was expected of them; 0 when it did not say."""
        if expected <= 0.0:
            return 0.0
        kept = [
            (t.experiment.ratio - 1.0) / (made.expected - 1.0)
            for name, made in self._made.items()
            if (t := self._told.get(name))
            and t.experiment.state in MEASURED
            and t.experiment.ratio
            and made.expected > 1.01
        ]
        trust = min(max(median([TRUST, *kept]), 0.0), 1.0)
        return 1.0 + trust * (expected - 1.0) if expected > 1.0 else expected

    # when it goes wrong

    def _failed(self, fault: Fault) -> None:
        if fault.kind == "context" and self._room // 2 >= LEAST_ROOM:
            self._room //= 2
            self.desk.log(f"{self.name}: {fault} The next prompt is half as long.", "warning")
        elif fault.final or fault.kind == "context":
            self._leave(f"{fault} The run goes on without me.")
        else:
            self._setback(str(fault))

    def _setback(self, why: str) -> None:
        self._setbacks += 1
        self.desk.log(f"{self.name}: {why}", "warning")
        if self._setbacks >= SETBACKS:
            self._leave(
                f"{SETBACKS} thoughts in a row brought nothing, the last because: {why} The run goes on without me."
            )

    def _leave(self, why: str) -> None:
        self.left = why
        self.desk.log(f"{self.name}: {why}", "warning")
        self.desk.post(self.name, "insight", why)


def make_llm_agents(settings: LlmSettings | None, foci: Collection[str] = (), pause_s: float = 1.0) -> list[LlmAgent]:
    """The agents of a run that share one purse; none without settings."""
    if settings is None:
        return []
    purse = Purse(settings)
    return [LlmAgent(n, settings, purse, foci, pause_s) for n in range(1, settings.agents + 1)]
