"""Conversion of PyTorch modules to graphs: find MoE blocks, trace the rest with torch.export, convert, compare.

`from_torch` takes a module, `from_pt2` a program saved by torch.export. Both return an `Imported`, or raise
ExportError that names the module path and operation; a graph that does not compute what the module does is never
returned.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.common.compare import compare
from colibri.errors import ExportError
from colibri.frontends.recognise.chains import Alone, bounds, verify_bounds
from colibri.frontends.recognise.identify import dense_cost, find_blocks, nested_cost, unreached
from colibri.frontends.recognise.moe import Block, leaves, register_moe, registered
from colibri.frontends.recognise.report import Imported, Report
from colibri.frontends.recognise.routing import clear_choices
from colibri.frontends.torch.check import Ties, checked_module, degenerate
from colibri.frontends.torch.convert import WAY_OUT, Converter, MoeBody, explain
from colibri.frontends.torch.layers import OPS
from colibri.frontends.torch.saved import load_program, tamed
from colibri.ir.graph import Graph, Router
from colibri.reference import arithmetic
from colibri.reference.interpreter import Trace, run

TOLERANCE = 1e-5  # largest |difference| / max |output| of the whole graph
MARGIN = 1e-5  # between the last chosen logit and the next, relative to them; below, a row is not compared
RANDOM_ROWS = 32
WIDE = (1e-6, 1e-4, 1e-2, 30.0, 300.0, 3e3, 3e4, 3e5, 3e6, -3e2, -3e6)  # sizes of rows that show an expert's bounds
WIDE_TOLERANCE = 1e-3  # of such a row: large intermediate values leave fewer digits

# Decomposed, these would be many small operations, or would lose the name a refusal should give.
KEEP = frozenset(
    {"linear", "matmul", "layer_norm", "rms_norm", "group_norm", "instance_norm", "scaled_dot_product_attention",
     "gru", "lstm", "rnn_tanh", "rnn_relu", "silu", "gelu", "elu", "selu", "celu", "mish", "hardtanh", "hardswish",
     "hardsigmoid", "relu6", "softplus", "leaky_relu", "prelu", "log_sigmoid", "logsumexp", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d",
     "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "embedding",
     "one_hot", "upsample_nearest1d", "upsample_nearest2d", "pad", "unfold"}
)  # fmt: skip


@arithmetic.standard()
def from_torch(module: Any, example_inputs: Any, calibration: Any = None, name: str = "model") -> Imported:
    """The graph of `module` in eval mode, what was found, and the rows; module and rows are left as they were.

    `module`: a torch.nn.Module or torch.export.ExportedProgram. `example_inputs`: float tensor or array (batch, …), or
    a tuple of them. `calibration`: more such inputs, or an iterable of them: real data on which MoE blocks are
    identified and the graph is compared. Raises ExportError only.
    """
    report, checked = Report(), None
    try:
        with _quiet():
            checked = checked_module(module)
            return _from_torch(checked, example_inputs, calibration, name, report)
    except ExportError as error:
        reason = None if checked is None else degenerate(checked, bool(report.rejected))
        if reason is not None:
            error = ExportError(f"{reason}. Until then it is refused: {str(error).partition('; ')[0]}")
        error.report = report
        raise error from None
    except Exception as error:
        raise ExportError(f"unexpected {type(error).__name__}: {_first_line(error)}; please report this") from error


def _from_torch(module: nn.Module, example_inputs: Any, calibration: Any, name: str, report: Report) -> Imported:
    example = _inputs(example_inputs, "example_inputs")
    if len({len(x) for x in example}) != 1:
        raise ExportError(f"the inputs have different batch sizes: {[tuple(x.shape) for x in example]}")
    batch = len(example[0])
    if batch < 2:
        example = tuple(x.repeat(2, *(1,) * (x.dim() - 1)) for x in example)
    runs = [example, *_calibration(calibration)]
    tame = [tuple(map(tamed, row)) for row in runs]
    with _kept(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
        claims = registered(module)
        work = _as_float32(module, report, example).eval()
        reference = [_outputs(work, row) for row in runs]
        again = _outputs(work, example)
        blocks, report.rejected = find_blocks(work, _copies(tame), claims)
        report.blocks = [block.finding for block in blocks if block.finding is not None]
        told = {id(other) for block in blocks for other in block.others}
        report.warnings += [nested_cost(block) for block in blocks if block.nested and id(block) not in told]
        report.warnings += filter(None, map(unreached, blocks))
        rejected = report.rejected
        dense = [r for r in rejected if not any(f"{b.path}.".startswith(f"{r.path}.".lstrip(".")) for b in blocks)]
        report.warnings += filter(None, map(dense_cost, dense))
        notes = {r.path: f"{r}; if it is one all the same, say how with colibri.register_moe(...)" for r in rejected}
        bodies = [MoeBody(b.path, b.router, _experts(b)) for b in blocks]
        with leaves(blocks):
            graph = _convert(work, _copies(tame)[0], name, bodies, notes)
            bounded = [(block, _alone(block, bodies, notes)) for block in blocks if bounds(block)]
        for block, alone in bounded:
            verify_bounds(block, alone)
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, reference[0], strict=True)):
            raise ExportError("the module gives different outputs for the same input in eval mode; take the noise out")
        ties = Ties(graph, [block.path for block in blocks])
        _verify(graph, work, runs, reference, report, ties)
        report.warnings += ties.warnings()
    given = [
        np.concatenate([x.to(torch.float32).numpy() for x in port]) for port in zip(*(runs[1:] or runs), strict=True)
    ]
    return Imported(graph, report, given, batch)


@arithmetic.standard()
def from_pt2(path: str | Path, calibration: Any = None, name: str = "model", trust: bool = False) -> Imported:
    """The same for a program saved by torch.export.save, with MoE blocks found through its module hierarchy.

    The program must have been saved with its example inputs; a batch size fixed in it is made free. A file that could
    run code is refused unless `trust` is set. Raises ExportError only.
    """
    with _quiet():
        module, args = load_program(path, trust)
    return from_torch(module, args, calibration, name)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(values: Any, what: str) -> tuple[Tensor, ...]:
    """One call's inputs as float32 tensors with a batch axis."""
    row = tuple(values) if isinstance(values, tuple | list) else (values,)
    tensors = []
    for n, value in enumerate(row):
        if not isinstance(value, Tensor | np.ndarray):
            raise ExportError(f"{what}: input {n} is a {type(value).__name__}, not a tensor or NumPy array")
        tensor = torch.as_tensor(value).detach()
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ExportError(f"{what}: input {n} is {kind}; give floats or integers")
        if tensor.dim() == 0 or tensor.numel() == 0:
            raise ExportError(f"{what}: input {n} has shape {tuple(tensor.shape)}; the first axis must be the batch")
        if not tensor.is_floating_point() and int(tensor.abs().max()) > 1 << 24:
            raise ExportError(f"{what}: input {n} holds integers beyond 2^24, which float32 does not hold; split them")
        kept = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors.append(tensor.to("cpu", kept, copy=True))  # a module may write to its inputs
    if not tensors:
        raise ExportError(f"{what}: no input given")
    return tuple(tensors)


def _calibration(values: Any) -> list[tuple[Tensor, ...]]:
    if values is None:
        return []
    if isinstance(values, Tensor | np.ndarray | tuple):
        return [_inputs(values, "calibration")]
    if not isinstance(values, Iterable):
        raise ExportError(f"calibration is a {type(values).__name__}, not a tensor, a tuple or an iterable of them")
    return [_inputs(value, f"calibration {n}") for n, value in enumerate(values)]


def _as_float32(module: nn.Module, report: Report, example: Sequence[Tensor]) -> nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()} - {"float32"})
    if not kinds:
        return module
    report.warnings.append(f"the module holds {', '.join(kinds)}; converted to float32")
    try:
        work = copy.deepcopy(module).float()
    except Exception as error:
        raise ExportError(f"the module holds {', '.join(kinds)} and cannot be copied: {_first_line(error)}") from None
    try:
        _outputs(work.eval(), example)
    except ExportError as error:
        raise ExportError(
            f"the module holds {', '.join(kinds)}, and does not run once converted to float32, which is what is "
            f"computed with; if its forward casts, leave that out or cast to the dtype of the weights: {error}"
        ) from None
    return work


def _copies(rows: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """The rows anew, for code that may write to them."""
    return [tuple(x.clone() for x in row) for row in rows]


def _outputs(module: nn.Module, row: Sequence[Tensor]) -> list[Tensor]:
    """The module's outputs, flattened in order."""
    with _located(module, "cannot be run on these inputs", {}):
        results = module(*(x.clone() for x in row))
        return [y.clone() for y in pytree.tree_leaves(results) if isinstance(y, Tensor)]


# --- tracing ----------------------------------------------------------------------------------------------------------


def _convert(
    module: nn.Module, example: Sequence[Tensor], name: str, bodies: Sequence[MoeBody], notes: Mapping[str, str]
) -> Graph:
    """Trace with a free batch size and convert."""
    graph = Graph(name)
    program = _trace(module, example, notes)
    Converter(graph, OPS, bodies, notes).run(program, program.state_dict)
    graph.validate()
    return graph


def _alone(block: Block, bodies: Sequence[MoeBody], notes: Mapping[str, str]) -> Graph:
    """The graph of one block and nothing around it."""
    two = 2 * block.rows.per_sample
    rows = block.rows.whole(block.rows.real[:two], two)
    return _convert(Alone(block), block.rows.split(rows), block.path, bodies, notes)


def _trace(module: nn.Module, example: Sequence[Tensor], notes: Mapping[str, str]) -> Any:
    # torch prints the half-made program to stderr when it gives up; its fused attention layer has no parts to see.
    with (
        _plain_attention(),
        _located(module, "cannot be traced by torch.export", notes),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        named = inspect.signature(module.forward).bind(*example).arguments
        free = pytree.tree_map(lambda _: {0: torch.export.Dim.AUTO}, dict(named))
        try:
            program = torch.export.export(module, tuple(example), dynamic_shapes=free, strict=False)
        except Exception as error:
            if "data-dependent" in str(error):
                raise
            try:  # what looks into modules sees some that what runs them does not
                program = torch.export.export(module, tuple(example), dynamic_shapes=free, strict=True)
            except Exception:
                raise error from None
        return program.run_decompositions(_decompositions())


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@functools.cache
def _decompositions() -> dict[Any, Any]:
    table = torch.export.default_decompositions()
    return {op: table[op] for op in table if op._schema.name.partition("::")[2] not in KEEP}


def _experts(block: Block) -> list[Graph]:
    """Each expert as the graph of one token, compared with the expert.

    Experts are usually one program with different weights: an expert is traced only where an earlier one's program does
    not give its outputs when run with its weights.
    """
    experts, width = block.bodies()
    tokens = _sized(torch.randn(RANDOM_ROWS, width, generator=torch.Generator().manual_seed(2)))
    graphs: list[Graph] = []
    programs: dict[str, Any] = {}
    for n, expert in enumerate(experts):
        name, expected = f"{block.path}.expert{n}".lstrip("."), expert(tokens).numpy()
        moved = expert(tokens * (1 + torch.finfo(torch.float32).eps)).numpy()
        state = expert.state_dict()
        alike = f"{expert} {[(key, value.shape) for key, value in state.items()]}"
        try:
            graph = _fitting(name, programs[alike], state, tokens, expected, moved) if alike in programs else None
            if graph is None:
                programs[alike] = program = _trace(expert, (tokens,), {})
                graph = _fitting(name, program, program.state_dict, tokens, expected, moved)
        except ExportError as error:
            raise ExportError(f"{block.path or 'the module'}: expert {n}: {error}") from None
        if graph is None:
            raise ExportError(f"{block.path or 'the module'}: expert {n} differs from its graph; please report this")
        graphs.append(graph)
    return graphs


def _fitting(
    name: str, program: Any, state: Mapping[str, Tensor], tokens: Tensor, expected: np.ndarray[Any, Any],
    moved: np.ndarray[Any, Any],
) -> Graph | None:  # fmt: skip
    """The program with these weights as a graph, or None where it does not give `expected`; wide rows that one rounding
    of the input has `moved` tell nothing."""
    graph = Graph(name)
    Converter(graph, OPS, (), {}).run(program, state)
    ours = run(graph, [tokens.numpy()])[0]
    wide = len(tokens) - len(WIDE)  # from here on rows that show what bounds and guards do, each of its own size
    if not compare(expected[:wide], ours[:wide]).within(TOLERANCE):
        return None
    each = [slice(n, n + 1) for n in range(wide, len(tokens))]
    told = [n for n in each if compare(expected[n], moved[n]).error <= WIDE_TOLERANCE / 10]
    return graph if all(compare(expected[n], ours[n]).error <= WIDE_TOLERANCE for n in told) else None


def _sized(tokens: Tensor) -> Tensor:
    """The rows, and some of them again in other sizes."""
    return torch.cat([tokens, *(tokens[n % len(tokens)][None] * size for n, size in enumerate(WIDE))])


@contextlib.contextmanager
def _located(module: nn.Module, what: str, notes: Mapping[str, str]) -> Iterator[None]:
    """Turn whatever torch raises into an ExportError that names the innermost module that was running."""
    trail: list[str] = []

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        trail.pop()

    hooks = []
    for path, m in module.named_modules():
        hooks.append(m.register_forward_pre_hook(lambda m, args, path=path: trail.append(path)))
        hooks.append(m.register_forward_hook(leave))
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        at = trail[-1] if trail else ""
        kind = type(module.get_submodule(at)).__name__
        message = f"({kind}) {what}: {type(error).__name__}: {_first_line(error)}"
        if "data-dependent" in message:
            message += f"; Python must not decide on tensor values (.item(), `if mask.any()`): {WAY_OUT}"
        raise ExportError(explain(at, message, notes)) from None
    finally:
        for hook in hooks:
            hook.remove()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Restore training flags, parameters and buffers afterwards, to the bit."""
    modes = [(m, m.training) for m in module.modules()]
    held = [(t, _once(t.detach()).clone(), t.requires_grad) for t in (*module.parameters(), *module.buffers())]
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
        with torch.no_grad():
            for tensor, value, wanted in held:
                _once(tensor).copy_(value)
                tensor.requires_grad_(wanted)


def _once(tensor: Tensor) -> Tensor:
    """The tensor without the repetitions of an expanded axis, which cannot be written to."""
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own warnings and logs out of the user's terminal: what matters is in the error or the report."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# --- verification -----------------------------------------------------------------------------------------------------


def _verify(
    graph: Graph, module: nn.Module, runs: list[tuple[Tensor, ...]], reference: list[list[Tensor]], report: Report,
    ties: Ties,
) -> None:  # fmt: skip
    """Compare graph and module on the given rows, the first of them alone, and random rows like the example."""
    alone = tuple(x[:1] for x in runs[0])
    sets = [*zip(runs, reference, strict=True), (alone, _outputs(module, alone)), _random_rows(module, runs[0])]
    counted: list[int] = []  # rows with finite numbers, by output
    for row, expected in sets:
        trace = Trace()
        results = run(graph, [x.to(torch.float32).numpy() for x in row], trace)
        clear = _clear(graph, trace, len(row[0]))
        ties.look(trace, clear)
        report.ambiguous += int((~clear).sum())
        if not clear.any():
            continue
        counted = counted or [0] * len(results)
        for n, (y, ours) in enumerate(zip(expected, results, strict=True)):
            theirs = y.to(torch.float32).numpy().reshape(len(clear), -1)  # rows may be merged with another axis
            found = compare(theirs[clear], ours.reshape(theirs.shape)[clear])
            counted[n] += found.rows
            report.error = max(report.error, found.error)
            if not report.error <= TOLERANCE:
                raise ExportError(
                    f"output {n} of the graph differs from the module's: the largest difference over the largest "
                    f"output is {report.error:.1e}, above {TOLERANCE}; please report this with the module"
                )
    report.rows = min(counted, default=0)
    if not counted:
        raise ExportError(
            "in every row some choice of experts is a tie, so nothing could be compared: train the router, or pass "
            "calibration rows on which it decides"
        )
    if report.rows == 0:
        raise ExportError(
            f"output {counted.index(0)} of the module is NaN or infinite in every row, so nothing could be compared: "
            "pass example inputs or calibration rows for which it gives numbers"
        )


def _random_rows(module: nn.Module, example: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Finite rows of noise like the example, and the module's outputs.

    Where the module cannot be run on noise (ids out of range) and for integers, every number is one of the example's at
    its place in another row.
    """
    generator = torch.Generator().manual_seed(0)

    def mixed(x: Tensor) -> Tensor:
        rows = torch.randint(len(x), (RANDOM_ROWS, *x.shape[1:]), generator=generator)
        return torch.gather(x, 0, rows)

    def noise(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return mixed(x)
        spread = x.std() if x.numel() > 1 else 1.0
        return x.mean() + spread * torch.randn(RANDOM_ROWS, *x.shape[1:], generator=generator)

    tame = tuple(map(tamed, example))
    try:
        rows = tuple(tamed(noise(x)) for x in tame)
        return rows, _outputs(module, rows)
    except ExportError:
        rows = tuple(map(mixed, tame))
        return rows, _outputs(module, rows)


def _clear(graph: Graph, trace: Trace, batch: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows choose their experts by more than rounding could turn around, in every layer and token."""
    clear = np.ones(batch, np.bool_)
    for node, logits in zip(graph.moe_nodes(), trace.logits, strict=True):
        router: Router = node.attrs["router"]
        k, experts = router.k, router.experts
        if k < experts and not router.keyed:
            ordered = np.sort(logits, axis=-1)
            chosen, other = ordered[..., experts - k], ordered[..., experts - k - 1]
            usual = np.median(np.abs(np.where(np.isneginf(logits), np.float32(0), logits)), axis=-1)  # -inf masks
            size = np.maximum(np.maximum(np.abs(chosen), np.abs(other)), usual)
            masked = np.isneginf(other) & (chosen > -np.inf)
            clear &= (masked | (chosen - np.where(masked, 0, other) > MARGIN * size)).all(-1)
        # PyTorch compares scores, which may be equal where logits are not.
        scores = clear_choices(torch.from_numpy(logits.reshape(-1, experts)), router, MARGIN)
        clear &= scores.view(batch, -1).all(1).numpy()
    return clear


__all__ = ["Report", "from_pt2", "from_torch", "register_moe"]
