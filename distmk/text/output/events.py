"""The events that an output parser turns the text of one choice into."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. `index`: its number in the choice; `call_id`: by which the client answers it."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of call `index`: JSON text, unless the model wrote something else."""

    index: int
    text: str


Event = Reasoning | Content | CallBegin | Arguments


def merged(events: list[Event]) -> list[Event]:
    """The same events, pieces of one kind that follow each other joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            joined[-1] = replace(last, text=last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        else:
            joined.append(event)
    return joined
