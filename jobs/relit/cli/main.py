"""The `relit` command: its verbs, and what every verb shares.

A verb's module is imported when the verb is used (or all of them for --help); the modules import
ray, torch and the stores inside their functions, so that `relit --help` is instant.

Exit codes: 0 done, 1 internal, 2 your input, 100 failed, 101 not finished, 102 not found,
103 stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import click

from relit.cli.lazy import LazyGroup
from relit_storage.errors import RelitError

_VERBS = {
    "submit": "relit.cli.steering:submit",
    "validate": "relit.cli.steering:validate",
    "ls": "relit.cli.runs:ls",
    "status": "relit.cli.runs:status",
    "watch": "relit.cli.watch:watch",
    "logs": "relit.cli.runs:logs",
    "events": "relit.cli.runs:events",
    "incidents": "relit.cli.runs:incidents",
    "stop": "relit.cli.steering:stop",
    "resume": "relit.cli.steering:resume",
    "result": "relit.cli.runs:result",
    "ckpt": "relit.cli.ckpt:ckpt",
    "doctor": "relit.cli.health:doctor",
    "cluster": "relit.cli.health:cluster",
    "demo": "relit.demo.command:demo",
    "completion": "relit.cli.main:completion",
}


@click.group(cls=LazyGroup, verbs=_VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="relit")
def cli() -> None:
    """Fault-tolerant training on Ray: submit, watch, stop, resume.

    RUN is a run id, a unique beginning of one, or the path of a run directory. Runs are looked up
    in --store (or RELIT_STORE, or ~/.relit/store); all but submit and resume work without a
    cluster.
    """


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL: eval "$(relit completion bash)"."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "relit", "_RELIT_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Errors that relit raises on purpose are one line."""
    from relit.errors import exit_code

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = cli.main(args=given, prog_name="relit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as leave:  # a verb's own exit code, such as 103
        return leave.code if isinstance(leave.code, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        if "--json" in given:
            _say_json(type(error).__name__, error.format_message(), error.exit_code)
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; the run goes on", err=True)
        return 130
    except BrokenPipeError:
        # The reader of our pipe has left (`relit events | head`): nothing more to say.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
        return 0
    except RelitError as error:
        return _report(error, exit_code(error), as_json="--json" in given)
    except Exception as error:
        if os.environ.get("RELIT_TRACEBACK"):
            raise
        return _report(_internal(error), 1, as_json="--json" in given)


def _internal(error: Exception) -> RelitError:
    """Something nobody foresaw, in one line; the traceback is for whoever asks for it."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return RelitError(f"internal: {what}. RELIT_TRACEBACK=1 shows where; please report it.")


def _report(error: RelitError, code: int, as_json: bool) -> int:
    from relit.spec.secret_guard import Redactor

    text = Redactor.from_environment().text(str(error))
    if as_json:
        _say_json(type(error).__name__, text, code)
    click.echo(f"error: {text}", err=True)
    return code


def _say_json(name: str, message: str, code: int) -> None:
    click.echo(json.dumps({"error": name, "message": message, "exit_code": code}))
