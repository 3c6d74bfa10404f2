"""The `pd-cache` command: parses the command line, calls the function that does the work, prints the result
and exits.

Exit codes: 0 success, 1 failure, 2 the command line or the file cannot be used, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
import msgspec

import pd_cache
from pd_cache.cluster import ROLES, ClusterConfig, Problem, load_config, read_config
from pd_cache.cluster.machine import shown_bytes
from pd_cache.errors import ConfigError, PdCacheError
from transfer.settings import ByteSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from launch.operate.pool import PoolReport
    from launch.operate.scan import Scan
    from launch.run.supervise import StopFlag

F = TypeVar("F", bound="Callable[..., Any]")

_FILE = click.Path(path_type=Path)
_INTERRUPTED = 128 + signal.SIGINT
_SLOWEST, _FASTEST = ByteSize("1MiB"), ByteSize("1TiB")
_UNCUT = 10_000
"""Columns of a table without a limit."""
_EXAMPLES = Path(__file__).with_name("configs")
"""The files of `configs/`: a link to that folder in a clone, the files themselves in a wheel."""


def _file_option(
    *, required: bool = True, says: str = "The cluster's YAML file.", variable: str | None = "PD_CACHE_CONFIG"
) -> Callable[[F], F]:
    return click.option(
        "-c", "--config", "file", type=_FILE, required=required, envvar=variable, show_envvar=True, help=says
    )


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on stdout."
)


def _output() -> Console:
    """Returns the console. If the output is not a terminal (a pipe, say), no line is cut, unless COLUMNS sets
    a width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_UNCUT)


def _answer(as_json: bool, value: object, *shown: object, well: bool = True) -> None:
    """Prints `value` as one JSON object, or otherwise `shown`: text as it is, and tables as wide as the
    output. Then exits with 1 unless all is `well`."""
    if as_json:
        click.echo(msgspec.json.encode(value).decode())
    console = _output()
    for text in () if as_json else shown:
        if isinstance(text, str):
            click.echo(text)
        else:
            with console.capture() as captured:
                console.print(text)
            print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if not well:
        raise SystemExit(1)


def _running(file: Path) -> ClusterConfig:
    """Returns the cluster of a file. If `up` runs the file here, it has the ports that `up` chose."""
    from launch.run.up import running_config

    return running_config(file) or load_config(file)


def _count(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A click callback for numbers above 0: `20M` is 20 million."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmg]?)", value.lower())
    found = round(float(match[1]) * 1000 ** " kmg".index(match[2] or " ")) if match else 0
    if found < 1:
        raise click.BadParameter(
            f"expected a number such as 8192, 128k or 20M, got {value!r}", context, parameter
        )
    return found


@contextlib.contextmanager
def _under_way(name: str) -> Iterator[tuple[StopFlag, Callable[[str], None]]]:
    """Yields a flag that Ctrl-C sets, and a function that shows a line of progress on stderr. A terminal
    always shows the latest line; other outputs get one every 5 s."""
    from rich.console import Console

    from launch.run.supervise import stop_on_signals

    screen, next_line = Console(stderr=True), 0.0
    with screen.status(name) as latest, stop_on_signals() as stop:

        def show(line: str) -> None:
            nonlocal next_line
            latest.update(line)
            if not screen.is_terminal and time.monotonic() >= next_line:
                screen.print(line, soft_wrap=True, highlight=False)
                next_line = time.monotonic() + 5.0

        yield stop, show


def _rate(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A click callback for bytes a second."""
    with contextlib.suppress(ValueError):
        if _SLOWEST <= (rate := ByteSize(value)) <= _FASTEST:
            return rate
    raise click.BadParameter(f"expected {_SLOWEST} to {_FASTEST}, got {value!r}", context, parameter)


_rate_option = click.option(
    "--rate", callback=_rate, default="100MiB", show_default=True, help="The most bytes to read in a second."
)


class _Commands(click.Group):
    """Turns the project's exceptions, and a full disk as output, into one line and an exit code."""

    group_class = type

    def main(self, *args: Any, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # a terminal may not have every character, such as an ellipsis
            if isinstance(stream, io.TextIOWrapper):
                with contextlib.suppress(OSError):  # a pipe in the place of a file cannot seek
                    stream.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            # the rest of the buffer is lost
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"pd-cache: {error.filename or 'standard output'}: {error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            params = error.ctx.command.params if error.ctx else ()
            file = next((param for param in params if param.name == "file"), None)
            missing = isinstance(error, click.MissingParameter) and error.param is file
            if error.ctx is None or file is None or not (missing or "unexpected extra" in error.message):
                raise
            said = f"{error.format_message()} The file goes after -c: {error.ctx.command_path} -c FILE."
            raise click.UsageError(said, error.ctx) from None
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
        except PdCacheError as error:
            wrong_file = isinstance(error, ConfigError)
            click.echo(
                "pd-cache: " + (str(error).replace("\n", "\npd-cache: ") if wrong_file else str(error)),
                err=True,
            )
            ctx.exit(2 if wrong_file else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pd_cache.__version__, prog_name="pd-cache")
@click.option("-v", "--verbose", is_flag=True, help="Log details, also of the libraries.")
def main(verbose: bool) -> None:
    """A shared KV cache over Mooncake for disaggregated prefill/decode LLM serving.

    PD_CACHE_CONFIG replaces -c. Exit codes: 0 success; 1 failure; 2 the command line or the file cannot be
    used; 130 Ctrl-C.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def _log_what_happens() -> None:
    """Sets up the log for long-running commands: our own log reports what happens, not only what goes
    wrong."""
    for package in ("transfer", "pd_cache", "launch"):
        logging.getLogger(package).setLevel(min(logging.INFO, logging.getLogger().level))


@main.command()
@click.argument("role", type=click.Choice(ROLES))
@_file_option()
@click.option("--node", "name", help="The node's name; needed if this machine has several nodes of the role.")
def launch(role: str, file: Path, name: str | None) -> None:
    """Run one node in the foreground until SIGTERM. Prints `ready NODE ADDRESS` when it can be used."""
    from launch.run.roles import run_role
    from launch.run.up import chosen_ports, pick_node, unresolved_port
    from pd_cache.cluster.machine import check_machine

    _log_what_happens()
    config, source = read_config(file)
    node = pick_node(config, role, name)
    if problem := unresolved_port(config, node):
        raise source.error(problem)
    check_machine(config, source, [node])
    with chosen_ports(config, [node]) as config:
        chosen = config.node(node.name)
        assert chosen is not None
        run_role(config, chosen, lambda url: click.echo(f"ready {node.name} {url}".rstrip()))


@main.command()
@_file_option()
def up(file: Path) -> None:
    """Run all nodes of this machine, and restart those that die.

    Runs until SIGTERM or Ctrl-C. Prints `ready NODE ADDRESS` for each node."""
    from launch.run.supervise import stop_on_signals
    from launch.run.up import running, welcome

    _log_what_happens()
    config, source = read_config(file)

    def shown(line: str) -> None:
        click.echo(line, err=not line.startswith("ready "))

    with stop_on_signals() as stop, running(config, source, stop=stop, sink=shown) as cluster:
        if not stop.is_set():
            click.echo(welcome(cluster, file))
            cluster.supervisor.wait(stop)
    if stop.signal == signal.SIGINT:
        raise SystemExit(_INTERRUPTED)


@main.command()
@_file_option(
    required=False, says="The cluster's YAML file; by default that of `config example local`.", variable=None
)
@_json_option
def demo(file: Path | None, as_json: bool) -> None:
    """Run a cluster on this machine and check its answers.

    Sends five prompts, and compares the answers with those of an engine without a cache."""
    from launch.demo import run_demo

    if not run_demo(file or example_file("local"), as_json=as_json):
        raise SystemExit(1)


@main.command()
@_file_option()
@_json_option
def status(file: Path, as_json: bool) -> None:
    """Show each node: role, state, hit rate, requests and errors.

    Exits with 1 if anything is wrong.
    """
    from launch.operate.status import as_dict, status_table
    from launch.watch.asker import cluster_status

    found = cluster_status(_running(file))
    _answer(as_json, as_dict(found), status_table(found), well=found.well)


@main.command()
@_file_option()
@click.option(
    "--once", is_flag=True, help="Print one table and exit; the default if the output is not a terminal."
)
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 30.0),
    default=2.0,
    show_default=True,
    help="How often each node is asked, in seconds.",
)
@_json_option
def top(file: Path, once: bool, interval: float, as_json: bool) -> None:
    """Show the nodes live: hit rates, latencies, queues, misses.

    `q` or Ctrl-C ends it. docs/monitoring.md explains the columns.
    """
    from launch.operate import top as shown
    from launch.watch.asker import cluster_status

    config, console = _running(file), _output()
    if not (once or as_json) and console.is_terminal and not console.is_dumb_terminal:
        shown.follow(config, console, interval)
        return
    status = cluster_status(config, 2, interval)  # two answers, because rates need two
    width = console.width if console.is_terminal else min(console.width, shown.WIDEST)
    nodes = [node.figures() for node in status.nodes]
    _answer(as_json, {"discovery": status.source, "nodes": nodes}, shown.plain(status, config.name, width))


@main.command()
@_file_option()
@click.option(
    "--version",
    metavar="LABEL",
    help="The label of the new weights: up to 64 letters, digits, dots, dashes and underscores. An empty label stands for the weights of the "
    "engines' files, e.g. after a sleep that changed nothing. By default a label is made.",
)
@click.option(
    "--all",
    "everywhere",
    is_flag=True,
    help="Give the label to all engines, not only to those that are out.",
)
@_json_option
def reset(file: Path, version: str | None, everywhere: bool, as_json: bool) -> None:
    """Give the new weights of engines a label.

    An engine whose weights change is out: it loads and stores nothing. Run this command when the last engine
    has the new weights. Engines share KV if they have the same label. Engines that are not out keep their
    label, unless you give --all. The exit code is 1 if an engine was not reached, or is still out. The old
    chunks are evicted in time; `pd-cache pool rm --old` removes them at once.
    """
    from launch.operate.reset import reset_engines
    from pd_cache.versions import LABEL

    if version is not None and not re.match(LABEL, version):
        raise click.BadParameter(
            "expected up to 64 letters, digits, dots, dashes and underscores", param_hint="--version"
        )
    done = reset_engines(_running(file), version, everywhere=everywhere)
    shown = (f"{name}: {what}" for name, what in done.nodes.items())
    _answer(as_json, done._asdict(), *shown, well=done.well)


@main.group()
def pool() -> None:
    """List, check, copy and remove what the pool holds."""


@pool.command("ls")
@_file_option()
@_json_option
def pool_ls(file: Path, as_json: bool) -> None:
    """List the namespaces in the pool and the memory of its segments.

    The keys of one model, layout and weights version begin with the same namespace. `used by` is the number
    of running nodes with this namespace, or `old` if all of them have other weights. Engines that
    discovery does not know are not counted. The pool does not know when a key was last read, or the tenant or
    `cache_salt` of a chunk.
    """
    from launch.operate.pool import space_table

    report = _survey(file)
    _answer(as_json, report, space_table(report.namespaces, report.segments))


@pool.command("rm")
@_file_option()
@click.argument("pattern", required=False)
@click.option(
    "--old", is_flag=True, help="Only versions that no engine has any more; without PATTERN, of all models."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def pool_rm(file: Path, pattern: str | None, old: bool, yes: bool) -> None:
    """Remove the namespaces whose name or model is PATTERN. PATTERN may have a shell's wildcards.

    Shows what it would remove, and asks for PATTERN again. Nodes that use these namespaces compute and store
    the chunks again.
    """
    from rich.console import Console

    from launch.operate import pool as pooled

    if not (old if pattern is None else pattern):
        raise click.UsageError("give a PATTERN or --old")
    report = _survey(file)
    chosen = pooled.choose(report, pattern or "*", old=old)
    if not yes:
        asked = pattern or "old"
        _answer(False, None, pooled.space_table(chosen))
        if click.prompt(f"Type {asked} to remove these namespaces", default="", show_default=False) != asked:
            raise PdCacheError("nothing was removed")
    with Console(stderr=True).status("removing …"):
        removed, busy = pooled.remove(_running(file), report, chosen)
    stay = f"; {busy} are being written and were kept" if busy else ""
    click.echo(f"{removed} objects removed{stay}")


@pool.command("verify")
@_file_option()
@click.argument("pattern", default="*")
@_rate_option
@click.option("--sample", type=click.IntRange(min=1), help="Read only this many objects, at random.")
@click.option(
    "--repair", is_flag=True, help="Remove damaged objects: engines then compute and store them again."
)
@_json_option
def pool_verify(file: Path, pattern: str, rate: int, sample: int | None, repair: bool, as_json: bool) -> None:
    """Read objects from the pool and check them as a load does. PATTERN selects namespaces by name or model;
    by default all are read.

    Ctrl-C ends the command and prints the result so far; the next run begins anew. Exits with 1 if an object
    is damaged or could not be read.
    """
    from launch.operate.scan import scan

    _follow(scan, file, pattern, as_json, rate=rate, sample=sample, repair=repair)


@pool.command("copy")
@_file_option()
@click.argument("pattern", default="*")
@click.option(
    "--to",
    "target",
    type=_FILE,
    required=True,
    help="The YAML file of the cluster whose pool gets the copies.",
)
@_rate_option
@_json_option
def pool_copy(file: Path, pattern: str, target: Path, rate: int, as_json: bool) -> None:
    """Copy objects to another cluster's pool. PATTERN selects namespaces by name or model; by default all are
    copied.

    Objects that the other pool has are skipped, so after Ctrl-C the same command continues. Nothing is
    removed, and damaged objects are not copied. Exits with 1 if an object could not be copied.
    """
    from launch.operate.scan import copy

    _follow(copy, file, pattern, as_json, target=_running(target), rate=rate)


def _follow(
    begin: Callable[..., Iterator[Scan]], file: Path, pattern: str, as_json: bool, **how: Any
) -> None:
    """Shows the progress of a scan of the namespaces, and exits with its command's code."""
    from launch.operate.pool import choose

    config, chosen, found = _running(file), choose(_survey(file), pattern, old=False), None
    try:
        with _under_way(begin.__name__) as (stop, show):
            for found in begin(config, chosen=chosen, stop=stop, **how):
                if found.done < found.objects:  # the result is printed below
                    show(found.text)
    finally:
        if found is not None:
            _answer(as_json, found, found.text)
    if stop.is_set():
        raise SystemExit(_INTERRUPTED)
    if found is not None and (found.damaged or found.failed):
        raise SystemExit(1)


def _survey(file: Path) -> PoolReport:
    from rich.console import Console

    from launch.operate.pool import survey

    config = _running(file)
    with Console(stderr=True).status("counting …"):
        return survey(config)


@main.command()
@click.argument("node")
@_file_option()
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1.0, 604_800.0),
    default=3600.0,
    show_default=True,
    help="Seconds after which to cancel. At most 16 objects move in a second.",
)
@_json_option
def drain(node: str, file: Path, timeout_s: float, as_json: bool) -> None:
    """Move the objects of NODE to the memory of other nodes. After that you can stop NODE without losing
    them.

    Meanwhile hits go on, and NODE takes no new objects. Ctrl-C cancels. Exits with 1 unless NODE is drained.
    """
    from launch.operate import drain as drained

    config = _running(file)
    with _under_way(node) as (stop, show):

        def report(state: drained.Drain) -> None:
            whole = f" of {shown_bytes(state.bytes)}" if state.bytes else ""
            sizes = f"{shown_bytes(state.moved_bytes)}{whole}"
            line = f"{node}: {state.moved} objects moved ({sizes}), {state.in_use} in use"
            show(line)

        found = drained.drain(config, node, timeout_s=timeout_s, report=report, stop=stop)
    _answer(as_json, found, drained.text_of(found, str(file)), well=found.outcome == "drained")


@main.command()
@_file_option(required=False, says="The cluster's YAML file; without it, only this machine is checked.")
@_json_option
def doctor(file: Path | None, as_json: bool) -> None:
    """Check this machine, and with -c its cluster. Says what is wrong, why it matters, and how to repair it.

    With -c, writes up to 64 MiB to each segment of the pool, reads them and removes them. Exits with 1 if
    anything is broken, but not for warnings.
    """
    from rich.console import Console

    from launch.doctor import examine
    from launch.doctor.report import report_table

    config = None if file is None else _running(file)
    with Console(stderr=True).status("examining …"):
        report = examine(config, file)
    _answer(as_json, report, report_table(report), well=not report.broken)


@main.command()
@click.argument("request_id", required=False)
@click.option(
    "--prompt",
    "prompt_file",
    type=_FILE,
    help="A file with a prompt: a JSON list of token ids, or text, which the nodes tokenize.",
)
@click.option("--cache-salt", help="With --prompt: the request's `cache_salt`.")
@_file_option()
@_json_option
def explain(
    request_id: str | None, prompt_file: Path | None, cache_salt: str | None, file: Path, as_json: bool
) -> None:
    """Say why the prompt of a request was computed.

    With --prompt, say how much of a prompt each node would find now.
    REQUEST_ID is the `id` or the `X-Request-Id` of an answer. Proxies and nodes remember their last thousand
    requests. Exits with 1 if no node has a report on the request, or none could be asked about the prompt.
    """
    if (request_id is None) == (prompt_file is None):
        raise click.UsageError("give either a REQUEST_ID or --prompt FILE")
    if cache_salt is not None and prompt_file is None:
        raise click.UsageError("--cache-salt belongs to --prompt")
    from launch.operate import explain as explained

    config = _running(file)
    if request_id is not None:
        found = explained.explain_request(config, request_id)
        _answer(as_json, found, explained.request_text(found), well=found.known)
    else:
        assert prompt_file is not None
        nodes = explained.explain_prompt(config, explained.read_prompt_file(prompt_file), cache_salt)
        known = any(node.found is not None for node in nodes)
        _answer(as_json, {"nodes": nodes}, explained.prompt_text(nodes), well=known)


def _hint_options(command: F, by_request: bool = True) -> F:
    """The options of `pin`, `release` and `prefetch`, except for their own. `by_request`: whether the id of a
    request can name the prompt."""
    for option in (
        _json_option,
        click.option("--id", "action_id", help="The pin's name; by default a new pin gets a random name."),
        click.option("--cache-salt", help="The `cache_salt` of requests with this prompt."),
        click.option(
            "--request",
            "request_id",
            hidden=not by_request,
            help="The `X-Request-Id` of a recent request with this prompt.",
        ),
        click.option("--text", "prompt", help="The prompt as text, which a node tokenizes."),
        click.option(
            "--tokens",
            type=click.File("rb"),
            help="A file with a JSON list of the prompt's token ids; - is stdin.",
        ),
        _file_option(),
    ):
        command = option(command)
    return command


@main.command()
@_hint_options
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(min=0, min_open=True),
    required=True,
    help="Seconds to keep the prompt.",
)
def pin(**options: Any) -> None:
    """Keep a prompt's chunks in the pool for a while.

    They are safe from eviction (docs/hints.md). Exits with 1 if the proxy refuses."""
    _send_hint("kv.retain", **options)


@main.command()
@_hint_options
def release(**options: Any) -> None:
    """End the pins of a prompt, or the pin of this --id. Exits with 1 if no proxy has such a pin."""
    _send_hint("kv.release", **options)


@main.command()
@functools.partial(_hint_options, by_request=False)
def prefetch(**options: Any) -> None:
    """Make a decode node load a prompt before its request comes.

    It loads from the pool (docs/hints.md). Exits with 1 if the proxy refuses."""
    _send_hint("kv.prefetch", **options)


def _send_hint(
    kind: str, *, file: Path, as_json: bool, action_id: str | None, tokens: IO[bytes] | None, **payload: Any
) -> None:
    from launch.operate import pin as pins
    from pd_cache.decoding import decode_json

    if kind == "kv.release" and action_id is not None:
        payload["action_id"] = action_id
    elif kind == "kv.prefetch" and (
        payload["request_id"] is not None or (tokens is None) == (payload["prompt"] is None)
    ):
        raise click.UsageError(
            "a node needs the prompt itself: give it with exactly one of --tokens FILE and --text TEXT"
        )
    elif [tokens, payload["prompt"], payload["request_id"]].count(None) != 2:
        raise click.UsageError(
            "give the prompt with exactly one of --tokens FILE, --text TEXT and --request ID"
        )
    if tokens is not None:
        try:
            payload["tokens"] = decode_json(tokens.read(), list[int])
        except ValueError as error:
            raise click.BadParameter(
                f"expected a JSON list of token ids: {error}", param_hint="--tokens"
            ) from None
    given = {name: value for name, value in payload.items() if value is not None}
    answer = pins.send_action(_running(file), kind, given, action_id)
    _answer(as_json, answer, pins.answer_text(kind, answer), well=answer.status != "refused")


@main.group()
def config() -> None:
    """Work with a cluster's file."""


@config.command("check")
@_file_option(required=False)
@click.argument("old_file", metavar="[FILE]", type=_FILE, required=False)
@click.option(
    "--file-only", is_flag=True, help="Do not check whether this machine has the memory, devices and ports."
)
def config_check(file: Path | None, old_file: Path | None, file_only: bool) -> None:
    """Check the file, and list everything that is wrong with it.

    Some checks need the node's own machine: memory, devices, ports, files, disks, models, libraries, and
    vLLM's flags. They cover only the nodes of this machine. FILE without -c works until the next version.
    """
    from launch.doctor.checks import library_findings
    from launch.doctor.report import Verdict
    from launch.engines import vllm_command as vllm
    from launch.run.supervise import RoleError
    from pd_cache.cluster import EngineNode, ProxyNode, VllmEngineConfig, machine

    if old_file is not None:
        click.echo("`config check FILE` ends with the next version; use `config check -c FILE`", err=True)
        file = old_file
    if file is None:
        raise click.UsageError("Missing option '-c' / '--config'.")
    config, source = read_config(file)
    counts = [f"{len(nodes)} {role}" for role in ROLES if (nodes := config.by_role(role))]
    size = config.cache.chunk_size
    chunks = "chunk size by the model" if size == "auto" else f"chunks of {size} tokens"
    fine = f"{file}: ok: {config.name}: {', '.join(counts)}; {chunks}, {config.transfer.protocol}"
    if file_only:
        click.echo(fine)
        return
    mine = machine.local_nodes(config)
    problems = [*machine.machine_problems(config, mine), *machine.further_problems(config, mine)]
    engine = config.engine if isinstance(config.engine, VllmEngineConfig) else None
    engines = [node for node in mine if engine is not None and isinstance(node, EngineNode)]
    ours = [node for node in mine if not isinstance(node, ProxyNode) and node not in engines]
    if ours:
        place = ("nodes", config.nodes.index(ours[0]))
        problems += [
            Problem(place, finding.found)
            for finding in library_findings()
            if finding.verdict is Verdict.BROKEN
        ]
    warnings = []
    if engine is not None and engines and machine.find_program(engine.executable):
        click.echo("asking vLLM about its flags; this takes up to two minutes …", err=True)
        try:
            for name, why in vllm.refused_flags(config, engines).items():
                problems.append(Problem(("engine",), f"vLLM cannot run {name}: {why}"))
        except RoleError as error:
            warnings.append(f"vLLM's flags are not checked: {error}")
        refused = any(problem.path == ("engine", "model") for problem in problems)
        if not refused and (hub := machine.missing_model(engine)) is not None:
            warnings.append(
                f"engine.model: {engine.model} is neither a folder nor at {hub}: vLLM will download it"
            )
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if problems:
        raise source.error(*problems)
    click.echo(fine)
    click.echo(f"on this machine: {', '.join(node.name for node in mine) or 'no node'}")
    if others := [f"{node.name} ({node.host})" for node in config.nodes if node not in mine]:
        click.echo(f"on others, to be checked there: {', '.join(others)}")


@config.command("example")
@click.argument("name", type=click.Choice(sorted(file.stem for file in _EXAMPLES.glob("*.yaml"))))
def config_example(name: str) -> None:
    """Print an example of a cluster's file.

    `local` explains all keys except those for vLLM, which `vllm-local` explains."""
    click.echo(example_file(name).read_text(), nl=False)


@main.command()
@click.option("--model", type=_FILE, required=True, help="The model's folder, or its config.json.")
@click.option(
    "--tokens",
    callback=_count,
    default="10M",
    show_default=True,
    help="Different prompt tokens in the period over which you want hits, e.g. an hour.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    default=0.3,
    show_default=True,
    help="The hit rate that you want: the share of all prompt tokens that are found. From 0.3734 on, the pool has room for all --tokens.",
)
@click.option(
    "--prompt", callback=_count, default="8192", show_default=True, help="The length of a prompt, in tokens."
)
@click.option(
    "--ttft",
    "ttft_s",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Seconds in which such a prompt should be loaded.",
)
@click.option(
    "--tp", "ranks", type=click.IntRange(1), default=1, show_default=True, help="The tensor-parallel size."
)
@click.option(
    "--kv-dtype",
    type=click.Choice(("bfloat16", "float16", "float32", "fp8")),
    help="The dtype of the KV cache; by default the model's.",
)
@_json_option
def size(model: Path, as_json: bool, **wanted: Any) -> None:
    """Compute the memory and the network that a model's KV needs.

    A repeated prompt is loaded in whole chunks. The hit rate is that of FAST'25's trace of conversations;
    `pd-cache bench replay` measures other traces.
    """
    from launch.operate.size import size_of, size_text

    found = size_of(model, **wanted)
    _answer(as_json, found, *size_text(found, **wanted))


_BENCHES = {
    "bandwidth": "objects in the pool, against the raw transfer",
    "engine": "store and retrieve of one engine, against Mooncake's own calls",
    "lookup": "lookups, against their parts, with more and more clients",
    "proxy": "the time that the proxy adds to a request",
    "replay": "the hit rate of a trace on a real pool",
    "routing": "the proxy's policies on traces, simulated",
    "scale": "clusters of many nodes, simulated",
    "server": "the cache server, against a cache in the engine",
    "tiers": "memory, disk and pool",
    "ttft": "time to first token with and without the cache",
}


@main.command(
    context_settings={"allow_interspersed_args": False},  # arguments after the name belong to the bench
    epilog="\b\n" + "\n".join(f"{name:<10} {what}" for name, what in _BENCHES.items()),
)
@click.argument("name", type=click.Choice(tuple(_BENCHES)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str, arguments: Sequence[str]) -> None:
    """Measure pd-cache and, in the same run, the raw calls or a peer. Each bench has its own --help."""
    try:
        command: click.Command = importlib.import_module(f"bench.suites.{name}").main
        # its errors and Ctrl-C end as those of our other commands
        with command.make_context(
            f"pd-cache bench {name}", list(arguments), help_option_names=["-h", "--help"]
        ) as context:
            command.invoke(context)
    except ModuleNotFoundError as error:
        if error.name not in ("tokenizers", "transformers"):
            raise
        raise click.ClickException(
            f"{error}; install pd-cache's wheel with the extra `bench` (README.md, Install)"
        ) from error


def example_file(name: str) -> Path:
    """Returns the file that `config example NAME` prints."""
    return _EXAMPLES / f"{name}.yaml"
