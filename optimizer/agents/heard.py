"""What the board says to a built-in agent: programs that are closed, values to start from, questions to it, answers to its own.

It is read from the posts alone, so that an agent of a resumed run hears what was said before. What a model writes carries no data
and closes nothing; it is for people and other models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from optimizer.agents.programs.program import Program, ProgramError
from optimizer.records import Post, State


class Start(NamedTuple):
    """A program to try, and the post that led to it."""

    program: Program
    post: Post | None = None


@dataclass
class Heard:
    """`name` is the agent's. Each post is read once; `read` may be given the whole board every time."""

    name: str
    closed: list[Program] = field(default_factory=list)  # failed, or the same as a smaller one
    values: dict[str, Post] = field(default_factory=dict)  # parameter -> the latest insight of another agent
    questions: dict[str, Post] = field(default_factory=dict)  # to this agent and open, by id
    asked: dict[str, Post] = field(default_factory=dict)  # own questions, by the program they are about
    answers: list[tuple[Post, Post]] = field(default_factory=list)  # own question, answer of the one that was asked
    said: set[tuple[str, Any]] = field(default_factory=set)  # own insights: parameter and value
    _seen: set[str] = field(default_factory=set)

    def read(self, posts: Iterable[Post]) -> None:
        for post in posts:
            if post.id not in self._seen:
                self._seen.add(post.id)
                self._hear(post)

    def _hear(self, post: Post) -> None:
        data, own = post.data, post.agent == self.name
        if post.kind == "dead_end":
            self._close(data)
        elif post.kind == "insight" and "parameter" in data:
            if own:
                self.said.add((data["parameter"], data["value"]))
            else:
                self.values[data["parameter"]] = post
        elif post.kind == "question" and "program" in data:
            if own:
                self.asked[data["program"]] = post
            elif data.get("to") == self.name:
                self.questions[post.id] = post
        elif post.kind == "answer" and own:
            self.questions.pop(post.reply_to, None)
        elif post.kind == "answer" and "room" in data:
            asked = (q for q in self.asked.values() if q.id == post.reply_to and q.data["to"] == post.agent)
            self.answers += [(question, post) for question in asked]

    def _close(self, data: dict[str, Any]) -> None:
        """What failed, and what does the same as a program that it contains: the rest of it changes nothing there."""
        program, earlier = parsed(data.get("name", "")), parsed(data.get("same_as", ""))
        if program is None:
            return
        if data.get("state") == State.FAILED or (earlier and program != earlier and contains(program, earlier)):
            self.closed.append(program)

    def is_closed(self, program: Program) -> bool:
        """Whether a program in it failed or adds nothing. In another precision a kernel is another one."""
        return any(contains(program, c) and program.precision == c.precision for c in self.closed)

    def is_given_up(self, program: Program) -> bool:
        """Whether it holds an idea of one's own that made no difference and has no place in a faster program."""
        held = (set(question.data["parts"]) for question, answer in self.answers if not answer.data["room"])
        return any(parts <= set(program.parts) for parts in held)

    def suggested(self) -> Iterator[Start]:
        """One's own idea in the program of the agent that answered that it has room for it; the latest answer first."""
        for question, answer in reversed(self.answers):
            base = parsed(answer.data["program"])
            if answer.data["room"] and base and base.fits(*question.data["parts"]):
                yield Start(base.plus(*question.data["parts"]), answer)

    def started(self, program: Program) -> Start:
        """The program with the values that won in programs of others, where its kernels have them; no change of precision."""
        used, made = None, program
        if not self.values:
            return Start(program)
        for op in program.operators:
            for parameter in op.params:
                post, key = self.values.get(program.key(op, parameter.name)), program.key(op, parameter.name)
                if post is None or key in program.parameters:
                    continue
                value, here = post.data["value"], made.values_of(op)
                if value == op.resolve(here)[parameter.name] or not op.allows({**here, parameter.name: value}):
                    continue
                if (changed := made.plus(**{key: value})).precision == program.precision:
                    used, made = post, changed
        return Start(made, used)


def parsed(name: str) -> Program | None:
    """The program of that name; None for a name that a model chose."""
    try:
        return Program.parse(name) if name else None
    except ProgramError:
        return None


def contains(large: Program, small: Program) -> bool:
    """Whether `large` has all parts and all values of `small`."""
    return set(small.parts) <= set(large.parts) and set(small.values) <= set(large.values)


def spelled(names: Collection[str]) -> str:
    return " + ".join(names)
