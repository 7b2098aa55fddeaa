"""``jobqctl completion``: have the shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_JOBQCTL_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete jobqctl's commands and options.

    For bash: eval "$(jobqctl completion bash)" in ~/.bashrc.
    """
    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(context.find_root().command, {}, "jobqctl", _VARIABLE).source())
