"""`headrace chat`: a conversation in the terminal."""

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .client_options import (
    DEFAULT_URL,
    KeepPct,
    MaxTokens,
    Model,
    Seed,
    SpecPrefill,
    Stop,
    Temperature,
    Token,
    TopP,
    Url,
    complain,
    server,
)

if TYPE_CHECKING:
    from .answer_view import AnswerView
    from .client import BlockingClient

_HELP = """\
/system TEXT  set the system prompt (without a text: take it away)
/clear        forget the conversation
/exit         leave (so does Ctrl-D)
A line that ends in \\ goes on in the next one. Ctrl-C cancels an answer."""


@dataclass
class Conversation:
    """What has been said, and how to go on."""

    options: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """Return what the model is to see."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]


def chat(
    url: Url = DEFAULT_URL,
    token: Token = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    specprefill: SpecPrefill = None,
    keep_pct: KeepPct = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk to a model. Ctrl-C cancels an answer, Ctrl-D leaves, /help says more."""
    from .answer_view import AnswerView

    options = {
        "model": model,
        "specprefill": specprefill,
        "specprefill_keep_pct": keep_pct,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
    }
    conversation = Conversation(options, system)
    with server(url, token) as client:
        if sys.stdin.isatty():
            names = [one["name"] for one in client.hello["models"]]
            print(f"{model or names[0]} at {url}; /help, Ctrl-D leaves", file=sys.stderr)
        _converse(client, conversation, AnswerView())


def _converse(client: "BlockingClient", conversation: Conversation, view: "AnswerView") -> None:
    while (line := _read_line()) is not None:
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                print(_HELP, file=sys.stderr)
            case "/clear":
                conversation.turns.clear()
                print("forgotten", file=sys.stderr)
            case "/system":
                conversation.system = rest.strip() or None
            case _ if command.startswith("/") and len(command) > 1 and "/" not in command[1:]:
                complain(f"there is no {command}; /help lists what there is")
            case _:
                _answer(client, conversation, view, line)


def _answer(client: "BlockingClient", conversation: Conversation, view: "AnswerView", text: str) -> None:
    """Say something, and show the answer; what failed is as if it had not been said."""
    from .client import ConnectionLost, RequestFailed, RequestRefused

    conversation.turns.append({"role": "user", "content": text})
    try:
        with client.chat(conversation.messages(), **conversation.options) as stream:
            result = view.show(stream)
    except (RequestRefused, RequestFailed, ConnectionLost) as error:
        conversation.turns.pop()
        print(file=sys.stderr)
        complain(str(error))
        if isinstance(error, ConnectionLost) and not client.is_connected:
            raise
        return
    except KeyboardInterrupt:  # pressed twice
        conversation.turns.pop()
        print(file=sys.stderr)
        return
    view.end_line(result)
    if result.message is not None and (result.text or result.tool_calls):
        conversation.turns.append(dict(result.message))
    else:
        conversation.turns.pop()
    view.show_figures(result)


def _read_line() -> str | None:
    """Return what the user says next; None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then has editing and a history
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if is_terminal else "")
        except EOFError:
            if is_terminal:
                print(file=sys.stderr)
            return "\n".join(lines) or None
        except KeyboardInterrupt:
            lines.clear()
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            if not is_terminal:
                return None
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
