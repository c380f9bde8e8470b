"""The start menu of ``vorox train``: resume a checkpoint, start a new run, or remove old ones.

In: answers, one line each, and the runs on disk. Out: an equivalent ``vorox train`` command, printed before it starts.
The menu uses plain line input, so it works in every terminal and on Windows.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from vorox.cli.commands.options import DEFAULT_ROOT
from vorox.cli.planning.dry_run import RunPreview
from vorox.cli.planning.plan import speed_lines
from vorox.cli.terminal.output import print_wrapped
from vorox.cli.training.menu.checkpoint_list import ask_for_length, choose_checkpoint, list_entries, print_entries
from vorox.cli.training.menu.machine import print_machine, settings_for_machine
from vorox.cli.training.menu.new_run import ask_what_to_train, choose_name
from vorox.cli.training.menu.questions import Ask, Back, Leave, ask_yes_or_no, print_error, title
from vorox.cli.training.menu.removal import manage_checkpoints
from vorox.core.config.layers.presets import run_presets
from vorox.core.errors import VoroxError
from vorox.planning.hardware import Hardware, this_machine


@dataclass(frozen=True, slots=True)
class Command:
    """A ``vorox train`` command.

    Attributes:
        arguments: Configuration and settings.
        resume: Value of ``--resume``.
        name: Value of ``--name``.
        options: Further options, as words.
        finished_step: The step at which the run to resume was finished; ``None`` if it was not.
    """

    arguments: tuple[str, ...]
    resume: str = "auto"
    name: str | None = None
    options: tuple[str, ...] = ()
    finished_step: int | None = None

    def __str__(self) -> str:
        resume = [] if self.resume == "auto" else ["--resume", self.resume]
        name = [] if self.name is None else ["--name", self.name]
        return shlex.join(["vorox", "train", *self.arguments, *resume, *name, *self.options])


Inspect = Callable[[Command], "RunPreview"]
"""Inspects what a command would do, without building or writing anything."""


def open_menu(command: Command, inspect: Inspect, *, ask: Ask | None = None) -> Command | None:
    """Ask what to train until a command is ready.

    Args:
        command: The command so far: its configuration and settings are kept.
        inspect: Inspects a command.
        ask: Prints a prompt and returns the answer; default: ``input``.

    Returns:
        The command to run; ``None`` if the user leaves.
    """
    ask = ask or input
    root = Path(inspect(command).config.run.directory if command.arguments else DEFAULT_ROOT)
    hardware = this_machine()
    try:
        print_machine(root, hardware)
        while True:
            chosen = _choose(command, root, inspect, hardware, ask)
            if chosen is None:
                continue
            ready = _plan(chosen, inspect, hardware, ask)
            if ready is not None:
                return ready
    except (Leave, EOFError):
        typer.echo("\nNothing was started.")
        return None


def _choose(command: Command, root: Path, inspect: Inspect, hardware: Hardware, ask: Ask) -> Command | None:
    """Show the checkpoints, and return the command of the choice; ``None`` to show them again."""
    entries = list_entries(root)
    print_entries(entries, root)
    answer = choose_checkpoint(entries, root, ask)
    if isinstance(answer, str):
        if answer == "X":
            manage_checkpoints(root, ask)
            return None
        try:
            return _new_run(command, inspect, hardware, ask)
        except Back:
            return None
        except VoroxError as error:
            print_error(error)
            return None
    settings = tuple(word for word in command.arguments if "=" in word)
    return replace(command, arguments=settings, resume=answer.resume, finished_step=answer.finished_step)


def _new_run(command: Command, inspect: Inspect, hardware: Hardware, ask: Ask) -> Command:
    """Ask what to train and for its name; a preset gets settings for this machine."""
    if command.arguments:
        return replace(command, name=choose_name(inspect(command).config, ask))
    arguments, suits = ask_what_to_train(ask), []
    config = inspect(replace(command, arguments=arguments)).config
    if arguments[0] in run_presets() or arguments[0] == "--data":
        suits = settings_for_machine(config, hardware)
    print_wrapped(f"  Chosen for this machine: {setting} ({why})" for setting, why in suits)
    name = choose_name(config, ask)
    return replace(command, arguments=(*arguments, *(setting for setting, _ in suits)), name=name)


def _plan(command: Command, inspect: Inspect, hardware: Hardware, ask: Ask) -> Command | None:
    """Print the plan of a command and ask whether to start it; ``None``: back to the list."""
    title("Plan")
    try:
        command = _with_length(command, inspect, ask)
        plan = inspect(command)
        devices = replace(hardware, num_devices=_num_processes(command.options))
        lines = [*plan.lines(), *speed_lines(plan.config, devices)]
        print_wrapped(lines, plain_columns=119, indent_columns=15)
    except VoroxError as error:
        print_error(error)
        return None
    print_wrapped(["", "The same without this menu:", f"  {command}", ""])
    return command if ask_yes_or_no("Start?", ask) else None


def _num_processes(options: Sequence[str]) -> int:
    """Return the number after ``--nproc``; 1 without it."""
    return int(options[options.index("--nproc") + 1]) if "--nproc" in options else 1


def _with_length(command: Command, inspect: Inspect, ask: Ask) -> Command:
    """Offer to extend a run whose data grew, and ask for the new length of a finished one."""
    plan = inspect(command)
    growth = None if command.resume == "auto" else plan.growth
    if growth is not None and growth.can_extend and not plan.config.train.follow_growth:
        print_wrapped(growth.lines(), indent_columns=15)
        if ask_yes_or_no(f"Extend the run to {growth.now.total_steps:,} steps?", ask):
            return replace(command, arguments=(*command.arguments, "train.follow_growth=true"))
    names_length = any("train.num_" in word or word.startswith(("--steps", "steps=")) for word in command.arguments)
    if command.finished_step is None or names_length:
        return command
    setting = f"train.num_steps={ask_for_length(command.finished_step, ask)}"
    return replace(command, arguments=(*command.arguments, setting))
