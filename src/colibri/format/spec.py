"""The one table of all that Python and C share: format version, records, enumerations, limits, errors.

`tools/generate.py` writes the C header and the tables in the documents from it; a test fails when one is out of date.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.ir.graph import APPLY, BINARY, CACHES, ENDLESS, GROUP_RULES, MASKS, NORMALIZE, REDUCE, SCORES, UNARY
from colibri.ir.weights import ACTIVATION_GROUP, CELL_COLS, CELL_ROWS, WEIGHT_GROUP

VERSION = "0.1.0"
FORMAT_VERSION = 5
MAGIC = b"COLIBRI\0"

ALIGN_MODEL = 64  # of the file in memory, and of every tensor in it
ALIGN_CONTEXT = 64  # of the caller's block
ALIGN_BUFFER = 32  # of every planned buffer inside the block
ALIGN_EXPERT = 4096  # of every expert in the file, unless the exporter is told otherwise
HEAD_BYTES = 128  # the block's first bytes hold colibri_context_t on every target
EXPERT_TILE = 64  # most tokens in one run of an expert; its weights are read once for all of them
LANES = 8  # output rows interleaved in a weight matrix; partial sums of a reduction
GROUP = 256  # inputs summed in one chain before the chains are added up
PAGE = 64  # positions of a page of the attention cache
NONE = 0xFFFFFFFF  # "no tensor"
LIMIT = ENDLESS  # largest dimension or stride; keeps the validator's sums below 2**63
MAX_BATCH = 1 << 16
MAX_META = 1 << 28  # bytes of header and metadata: they are copied and validated before anything runs
MAX_EXPERTS = 65535  # of one layer: the certificate holds choices as u16, and 65535 for none

SPACES = ("none", "arena", "input", "output", "const", "token_in", "token_out", "token_weight")
LAYOUTS = ("flat", "rows8_f32", "rows8_f16", "rows8_i8", "rows8_i4", "outliers")
SCOPES = ("shared", "expert")

ERRORS: tuple[tuple[str, str], ...] = (
    ("OK", "no error"),
    ("NULL", "a pointer is null: pass the memory block, the model, the input and the output"),
    (
        "MISALIGNED",
        "the model or the memory block is not aligned to 64 bytes, or a row not to 4: use aligned_alloc",
    ),
    ("MAGIC", "this is not a Colibri model: the file does not start with COLIBRI; pass the exported model.bin"),
    ("VERSION", "the model's format version is not this engine's: export it again with the matching package"),
    ("TRUNCATED", "the model is shorter than its header says: copy or download it again"),
    ("HEADER", "the model's header is corrupt: its checksum or a field is wrong; export or copy it again"),
    ("CHECKSUM", "a checksum of the model does not match its content: copy it again from a good source"),
    (
        "PROGRAM",
        "the model's program is not valid: an operation reaches outside its memory or costs more than stated; "
        "export it again",
    ),
    ("TENSOR", "a tensor's place, size or layout in the model is not valid: export it again"),
    ("ROUTING", "a routing descriptor of the model is not valid: export it again"),
    ("EXPERT", "an entry of the model's expert directory is not valid: export it again"),
    ("MEMORY", "the memory block is too small: give it colibri_model_size() bytes"),
    ("TOO_LARGE", "the model does not fit this machine's address space: use a machine with 64-bit addresses"),
    ("BIG_ENDIAN", "this machine is big-endian, which the model format is not: run on a little-endian machine"),
    ("BATCH", "batch_size is not between 1 and the model's largest: split the batch or export with a larger one"),
    (
        "SELFTEST",
        "the output is not what the model's certificate says, or it has none: the port or the memory is faulty",
    ),
    # the host layer's, colibri_host.h
    ("OPEN_FAILED", "the model file cannot be opened or read: check path, permissions and that it is a regular file"),
    ("MMAP_FAILED", "the system does not map the model: free address space, or close one of 64 guarded maps"),
    ("CHANGED", "the model file was changed while it was mapped: open it again; replace model files by renaming"),
    ("READ_FAILED", "the medium cannot read a mapped page of the model: check the disk and copy the model again"),
    ("NO_EXPERT", "the model has no expert of this number: pass 0 to colibri_get_num_experts() - 1"),
    ("LOCK_LIMIT", "the limit on locked memory is reached: raise it (ulimit -l, LimitMEMLOCK=) or lock fewer experts"),
    ("LOCK_FAILED", "the system does not lock this memory: free some, or run where locking is allowed"),
    (
        "HUGE_PAGES",
        "the system gives this process no huge pages: allow them (transparent_hugepage=madvise) or go without",
    ),
    ("RELEASE_FAILED", "the system does not release this memory: unlock these experts first"),
    (
        "THREAD_FAILED",
        "a prefetching thread cannot be started: raise the limit (ulimit -u), free memory, or go without",
    ),
    ("UNSUPPORTED", "this system has no such service: read the model into memory and give that to colibri_init"),
    # language models'
    ("CONTEXT", "the text does not fit the model's context: rewind, or export with a longer one (--context)"),
    ("TOKEN", "a token id is not in the vocabulary: use the model's own tokenizer"),
    ("REWIND", "the positions to go back to are no longer in the cache: rewind to 0 and evaluate the text again"),
    # the tokenizer's, colibri_tokenizer.h
    ("TOKENIZER", "this is not a tokenizer.bin, or it is damaged: write or copy it again"),
    ("SCRATCH", "the scratch memory is too small for this text: give it colibri_tokenizer_scratch() bytes"),
    ("OUTPUT", "the output array is too small: give it room for as many elements as the count returned"),
    ("SOURCE", "an encoder-decoder model, and no other, reads a source text first: see colibri_lm_source"),
    # the arithmetic, and what a context is doing
    (
        "ARITHMETIC",
        "this build or machine does not compute as IEEE 754 says: compile without options that change floats "
        "(docs/arithmetic.md)",
    ),
    ("BUSY", "the context is running already: a hook or another thread needs a context of its own"),
    (
        "UNFINISHED",
        "the self-test would end the text or stream that this context holds: test a second context, or set position "
        "and source to 0",
    ),
    # the tokenizer's proofs
    ("VOCABULARY", "a token, merge or template of the tokenizer.bin is not valid: write it again"),
    ("ADDED_TOKEN", "the added tokens of the tokenizer.bin are not tries of whole characters: write it again"),
    ("PATTERN", "a split pattern or a character class of the tokenizer.bin is not valid: write it again"),
    ("NORMAL_FORM", "the normal form (NFC) of the tokenizer.bin is not valid: write it again"),
    ("TOO_SLOW", "the patterns or added tokens of the tokenizer.bin take too much work for this text: write it again"),
    # the context's, and the proof of a program's order
    ("DAMAGED", "the context's head was overwritten: look for a stray write, and start again with colibri_init"),
    (
        "ORDER",
        "an operation of the model reads what none has written, or another row's, or overwrites what it still reads: "
        "export it again",
    ),
)


@dataclass(frozen=True)
class Field:
    """One field of a record: C type (`u8 u16 u32 u64 f32` or a record's name), name, number of elements, meaning."""

    type: str
    name: str
    count: int
    doc: str


@dataclass(frozen=True)
class Record:
    """A fixed-size little-endian record without implicit padding."""

    name: str
    bytes: int
    doc: str
    fields: tuple[Field, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy structured dtype of the record."""
        columns = [(f.name, field_dtype(f.type), (f.count,)) if f.count > 1 else (f.name, field_dtype(f.type))
                   for f in self.fields]  # fmt: skip
        record = np.dtype(columns)
        assert record.itemsize == self.bytes, f"{self.name}: {record.itemsize} bytes, not {self.bytes}"
        return record


def field_dtype(kind: str) -> np.dtype[Any]:
    """The NumPy dtype of a field's type."""
    scalars = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "f32": "<f4"}
    return np.dtype(scalars[kind]) if kind in scalars else RECORDS[kind].dtype


def _record(name: str, size: int, doc: str, *fields: tuple[str, str, int, str]) -> Record:
    return Record(name, size, doc, tuple(Field(*f) for f in fields))


HEADER = _record(
    "header", 256, "The first bytes of the file.",
    ("u8", "magic", 8, "`COLIBRI` and a zero byte"),
    ("u32", "version", 1, "format version; a reader accepts its own only"),
    ("u32", "max_batch", 1, "rows the context memory is planned for"),
    ("u64", "total_bytes", 1, "size of the file"),
    ("u64", "meta_bytes", 1, "end of the metadata, where the shared weights begin"),
    ("u64", "shared_bytes", 1, "size of the weights outside the experts"),
    ("u64", "context_bytes", 1, "exact size of the memory block, the context's head included"),
    ("u64", "worst_macs", 1, "multiply-accumulates of one row if every token chose its layer's k costliest experts"),
    ("u64", "worst_bytes", 1, "weight bytes read by one row along the costliest route"),
    ("u32", "input_floats", 1, "floats of one input row: the inputs concatenated"),
    ("u32", "output_floats", 1, "floats of one output row: the outputs concatenated"),
    ("u32", "ports_offset", 1, "file offset of the port records, inputs first"),
    ("u32", "inputs", 1, "number of inputs"),
    ("u32", "outputs", 1, "number of outputs"),
    ("u32", "ops_offset", 1, "file offset of the operation records"),
    ("u32", "ops", 1, "number of operation records"),
    ("u32", "main_ops", 1, "how many of them are the main program; the rest belong to experts"),
    ("u32", "tensors_offset", 1, "file offset of the tensor directory"),
    ("u32", "tensors", 1, "number of tensors"),
    ("u32", "layers_offset", 1, "file offset of the MoE layer records"),
    ("u32", "layers", 1, "number of MoE layers"),
    ("u32", "experts_offset", 1, "file offset of the expert directory"),
    ("u32", "experts", 1, "number of experts in all layers together"),
    ("u32", "golden_offset", 1, "file offset of the parity certificate"),
    ("u32", "golden_rows", 1, "number of golden rows in it"),
    ("u32", "golden_bytes", 1, "size of one golden row"),
    ("u32", "info_offset", 1, "file offset of the information text (UTF-8 JSON)"),
    ("u32", "info_bytes", 1, "size of that text"),
    ("u32", "meta_crc", 1, "CRC-32 of the metadata, from the header's end to `meta_bytes`"),
    ("u32", "shared_crc", 1, "CRC-32 of the shared weights"),
    ("u32", "context_tokens", 1, "most tokens of a text; 0: samples are independent; 2^30: samples are the time steps "
     "of a stream without end"),
    ("u32", "tail_op", 1, "operations from here on may run for the last samples of a batch alone"),
    ("u32", "encoder_ops", 1, "operations that read the source text, before all others; 0: the model has none"),
    ("u64", "worst_work", 1, "elementary steps of one row along the costliest route, an upper bound; see Work"),
    ("u64", "cleared_bytes", 1, "bytes of the context block, from its start, that colibri_init clears; only "
     "attention's caches may lie behind them, and they are written before they are read"),
    ("u32", "reserved", 19, "zero"),
    ("u32", "header_crc", 1, "CRC-32 of the header's first 252 bytes"),
)  # fmt: skip

PORT = _record(
    "port", 64, "One input or output of the model.",
    ("u8", "name", 32, "UTF-8 without control characters, zero-padded; not empty, and ends with a zero"),
    ("u32", "floats", 1, "elements of one row"),
    ("u32", "rank", 1, "number of axes after the batch"),
    ("u32", "dims", 6, "their sizes, then zeros"),
)  # fmt: skip

OPERAND = _record(
    "operand", 24, "Where an operation finds one row of a value: offset + sample · sample_stride + row · row_stride + "
    "step · step_stride.",
    ("u64", "offset", 1, "bytes from the start of the space"),
    ("u32", "sample_stride", 1, "floats from one sample (in an expert: one token) to the next"),
    ("u32", "row_stride", 1, "floats from one row of a sample to the next"),
    ("u32", "space", 1, "a `space` value; `const` reads the tensor `w0` (operand a) or `w1` (operand b)"),
    ("u32", "step_stride", 1, "floats from one step of the loop the operation is in to the next; zero outside loops"),
)  # fmt: skip

OP = _record(
    "op", 192, "One operation on `rows` rows of every sample.",
    ("u16", "code", 1, "an `op` value"),
    ("u16", "func", 1, "function of unary, binary, reduce; activation of linear; a `cache` value of cache, attention"),
    ("u32", "rows", 1, "rows per sample; delay: time steps it recalls, one row each"),
    ("operand", "a", 1, "first input; for `moe` the tokens"),
    ("operand", "b", 1, "second input of binary; for `moe` the logits; for `cache` the values; for linear a computed "
     "matrix, in layout rows8_f32"),
    ("operand", "out", 1, "output"),
    ("operand", "work", 1, "for `moe` its workspace: slots, weights, choices, grouping; for cache, attention, delay "
     "and delta what they keep from one run to the next"),
    ("u32", "w0", 1, "a tensor, or `0xFFFFFFFF`: none; a constant operand a of unary and binary"),
    ("u32", "w1", 1, "a tensor, or none; a constant operand b of binary"),
    ("u32", "w2", 1, "a tensor, or none"),
    ("u32", "dims", 4, "sizes inside a row, padded with 1; for unary and binary the sizes of the axes"),
    ("u32", "strides_a", 4, "strides of a, in floats"),
    ("u32", "strides_b", 4, "strides of b, in floats"),
    ("u32", "strides_out", 4, "strides of out, in floats, row-major"),
    ("f32", "alpha", 1, "first parameter of the function"),
    ("f32", "beta", 1, "second parameter of the function"),
    ("u16", "before", 1, "binary: the `unary` function applied to a first; zero elsewhere"),
    ("u16", "after", 1, "binary: the `unary` function, with alpha and beta 0, applied to the result; zero elsewhere"),
)  # fmt: skip

# Fields with the same meaning in every operation; names of the others are in VIEWS.
OP_COMMON = ("code", "func", "rows", "a", "b", "out", "work", "before", "after")

TENSOR = _record(
    "tensor", 32, "One weight tensor.",
    ("u64", "offset", 1, "bytes from the start of the file, or of the expert where the scope is `expert`"),
    ("u64", "bytes", 1, "size, padding of the layout included"),
    ("u32", "layout", 1, "a `layout` value; see Layouts"),
    ("u32", "rows", 1, "output rows (1 where flat)"),
    ("u32", "cols", 1, "inputs (elements where flat)"),
    ("u32", "scope", 1, "a `scope` value"),
)  # fmt: skip

GOLDEN = _record(
    "golden", 8, "The head of one golden row; after it float32 input[input_floats], then u16 choices in the order they "
    "are made (layer, token, slot), then zeros to a multiple of 4 bytes.",
    ("u32", "output_crc", 1, "CRC-32 of the output row's float32 bits"),
    ("u32", "choices", 1, "number of choices"),
)  # fmt: skip

LAYER = _record(
    "layer", 64, "One MoE layer: how it routes and where its experts are.",
    ("u32", "experts", 1, "number of experts"),
    ("u32", "k", 1, "experts chosen per token"),
    ("u32", "score", 1, "a `score` value"),
    ("u32", "normalize", 1, "a `normalize` value"),
    ("f32", "scale", 1, "factor on every weight"),
    ("u32", "first_expert", 1, "its first entry in the expert directory"),
    ("u32", "d_in", 1, "floats of a token"),
    ("u32", "d_out", 1, "floats of an expert's output"),
    ("u32", "tile", 1, "tokens an expert's scratch memory holds"),
    ("u32", "groups", 1, "groups of equal size that its experts form; 1: none"),
    ("u32", "kept_groups", 1, "groups that take part in the choice"),
    ("u32", "group_rule", 1, "a `group_rule` value: what ranks a group"),
    ("u32", "capacity", 1, "most tokens of a sample, or of a source text, per expert; 0: no limit"),
    ("u32", "apply", 1, "an `apply` value: what the weight multiplies"),
    ("f32", "epsilon", 1, "added to the sum of the weights, or its lower bound, or the sparse mixer's"),
    ("u32", "quantized", 1, "inputs of a token passed as a quantised row; 0: tokens are floats"),
)  # fmt: skip

EXPERT = _record(
    "expert", 64, "One expert: its weights, its program, its share of the calibration tokens.",
    ("u64", "offset", 1, "file offset of its weights"),
    ("u64", "bytes", 1, "their size"),
    ("u64", "macs", 1, "multiply-accumulates per token"),
    ("u32", "crc", 1, "CRC-32 of its weights"),
    ("u32", "layer", 1, "the layer it belongs to"),
    ("u32", "first_op", 1, "its first operation record"),
    ("u32", "ops", 1, "how many it has (experts of one shape share them); 0: pruned, returns zeros and has no bytes"),
    ("u32", "index", 1, "its number in the original model's layer"),
    ("f32", "frequency", 1, "share of the calibration tokens that chose it, 0 where unknown"),
    ("u32", "reserved", 4, "zero"),
)  # fmt: skip


# Words of an operation's record, counted from `w0`.
_W0, _W1, _W2, _DIMS, _STRIDES_A, _STRIDES_B, _STRIDES_OUT, _ALPHA, _BETA = 0, 1, 2, 3, 7, 11, 15, 19, 20


@dataclass(frozen=True)
class Named:
    """What an operation calls a word of its record, `count` words from `at` on, and the range that is proven.

    `at` counts 32-bit words from `w0`. Words without a range are proven otherwise, or may be anything. A word of type
    `tensor` is the number of one, or NONE.
    """

    name: str
    at: int
    doc: str
    least: int = 0
    most: int = NONE
    count: int = 1
    type: str = "u32"

    @property
    def is_size(self) -> bool:
        """Whether it is among the sizes inside a row, `dims` of the record."""
        return _DIMS <= self.at < _STRIDES_A


@dataclass(frozen=True)
class Operation:
    """One operation of the engine: its row in every table of operations, in Python and in C.

    `view` is its member of the record's union, `kernel` the C function (clb_…) that `walk` calls: for tiles of rows,
    for a matrix product, for all samples of a batch. `functions` is the enumeration of `func`. Whatever that is, the
    kernel calls the `unary` functions in `calls` too. `flash` is for generated code, which weighs what it may fold:
    bytes on a Cortex-M7 that the operation's own code takes beyond a call's.
    """

    name: str
    view: str
    proof: str
    kernel: str
    walk: str  # rows, product, batch, or its own name
    functions: str = ""
    traits: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    flash: int = 0

    @functools.cached_property
    def words(self) -> Mapping[str, Named]:
        """What it calls the words of its record."""
        return {word.name: word for word in VIEWS[self.view]}

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of its record: the fields that all operations have, and the words by their own names."""
        fields = dict(OP.dtype.fields or {})
        places = {name: fields[name][:2] for name in OP_COMMON}
        places |= {w.name: (_word_dtype(w), fields["w0"][1] + 4 * w.at) for w in VIEWS[self.view]}
        formats, offsets = zip(*places.values(), strict=True)
        return np.dtype({"names": list(places), "formats": formats, "offsets": offsets, "itemsize": OP.bytes})

    @property
    def has_strides(self) -> bool:
        """Whether its result has strides: otherwise a row is neighbouring floats."""
        return any(_STRIDES_OUT <= word.at < _ALPHA for word in VIEWS[self.view])


def _word_dtype(word: Named) -> Any:
    kind = field_dtype("u32" if word.type == "tensor" else word.type)
    return (kind, (word.count,)) if word.count > 1 else kind


TRAITS = {
    "in_place": "may write the rows that it reads",
    "has_axes": "its operands have axes; constants may be among them",
    "reads_once": "the rows that it reads have no place in common",
    "ends_in_function": "its last step is the `unary` function `func`, or its only one",
    "knows_positions": "in models of texts and streams only",
    "runs_all_samples": "outside experts, and before the tail: later tokens see what it does",
    "keeps_cache": "what it keeps lies behind what colibri_init clears",
    "reads_kept": "reads what another operation keeps for it",
    "stores_first": "stores all that it reads before it writes",
}
# What each operation calls its words, by `Operation.view`; `row` is for proofs that take any operation on rows.
VIEWS: dict[str, tuple[Named, ...]] = {
    "row": (Named("floats", _DIMS, "floats of a row, where an operation's own proof does not say"),),
    "linear": (
        Named("matrix", _W0, "tensor (outputs, inputs); none: operand b is the matrix, in layout rows8_f32",
              type="tensor"),
        Named("bias", _W1, "tensor (outputs), or none", type="tensor"),
        Named("outliers", _W2, "tensor: the sparse outliers E of an int8 or int4 matrix, or none", type="tensor"),
        Named("inputs", _DIMS, "floats of a row that is read", 1, LIMIT),
        Named("outputs", _DIMS + 1, "floats of a row that is written", 1, LIMIT),
        Named("alpha", _ALPHA, "first parameter of the function", type="f32"),
        Named("beta", _BETA, "second parameter of the function", type="f32"),
    ),
    "quantize": (Named("inputs", _DIMS, "floats of a row", 1, LIMIT // 2),),
    "map": (
        Named("constant_a", _W0, "tensor: operand a, or none", type="tensor"),
        Named("constant_b", _W1, "tensor: operand b, or none", type="tensor"),
        Named("sizes", _DIMS, "elements along each axis, the innermost last", 1, LIMIT, 4),
        Named("strides_a", _STRIDES_A, "floats to the next element along each axis", 0, LIMIT, 4),
        Named("strides_b", _STRIDES_B, "likewise", 0, LIMIT, 4),
        Named("strides_out", _STRIDES_OUT, "likewise", 0, LIMIT, 4),
        Named("alpha", _ALPHA, "first parameter of the `unary` function", type="f32"),
        Named("beta", _BETA, "second parameter of the `unary` function", type="f32"),
    ),
    "norm": (
        Named("gamma", _W0, "tensor (size), or none", type="tensor"),
        Named("beta", _W1, "tensor (size), or none", type="tensor"),
        Named("size", _DIMS, "floats of a row", 1, LIMIT),
        Named("epsilon", _ALPHA, "added to the mean of squares", type="f32"),
    ),
    "reduce": (
        Named("outer", _DIMS, "elements before the axis that is reduced", 1, LIMIT),
        Named("size", _DIMS + 1, "elements along it", 1, LIMIT),
        Named("inner", _DIMS + 2, "elements behind it", 1, LIMIT),
        Named("from_outer", _STRIDES_A, "floats between these in a", 0, LIMIT),
        Named("from_next", _STRIDES_A + 1, "floats between these in a", 0, LIMIT),
        Named("from_inner", _STRIDES_A + 2, "floats between these in a", 0, LIMIT),
        Named("to_outer", _STRIDES_OUT, "floats between outer elements in out", 0, LIMIT),
        Named("to_next", _STRIDES_OUT + 1, "of no meaning", 0, LIMIT),
        Named("to_inner", _STRIDES_OUT + 2, "floats between inner elements in out", 0, LIMIT),
    ),
    "loop": (
        Named("steps", _DIMS, "times that the body runs", 1, LIMIT),
        Named("body", _DIMS + 1, "how many of the next operations are in it", 1, LIMIT),
        Named("backward", _DIMS + 2, "1 where the last step comes first", 0, 1),
    ),
    "moe": (
        Named("layer", _W0, "which MoE layer"),
        Named("bias", _W1, "tensor (experts): the selection bias, or none", type="tensor"),
        Named("scale", _W2, "tensor (experts): a factor for each expert, or none", type="tensor"),
        Named("d_in", _DIMS, "floats of a token, as the layer has them"),
        Named("d_out", _DIMS + 1, "floats of an expert's output, likewise"),
        Named("scratch", _DIMS + 2, "floats of the experts' scratch memory, behind the workspace", 0, LIMIT),
    ),
    "embed": (
        Named("table", _W0, "tensor (vocabulary, width)", type="tensor"),
        Named("width", _DIMS, "floats of a row of the table", 1, LIMIT),
    ),
    "rope": (
        Named("table", _W0, "tensor (positions, turned): half cosines, half sines", type="tensor"),
        Named("size", _DIMS, "floats of a row", 1, LIMIT),
        Named("turned", _DIMS + 1, "how many of them are turned, from the first; even"),
    ),
    "attention": (
        Named("sinks", _W0, "tensor (heads): a score that has no value, or none", type="tensor"),
        Named("biases", _W1, "tensor: a bias for each head and distance, or none", type="tensor"),
        Named("key", _DIMS, "floats of a key", 1, LIMIT),
        Named("value", _DIMS + 1, "floats of a value", 1, LIMIT),
        Named("key_heads", _DIMS + 2, "heads of keys and values; each serves rows / key_heads queries", 1, LIMIT),
        Named("positions", _DIMS + 3, "positions that the cache holds, in whole pages", 1, LIMIT),
        Named("window", _STRIDES_A, "positions a token sees, its own included; 0: all", 0, LIMIT),
        Named("mask", _STRIDES_A + 1, "a `mask` value", 0, len(MASKS) - 1),
        Named("scale", _ALPHA, "factor on the scores", type="f32"),
        Named("softcap", _BETA, "soft cap of the scores; 0: none", type="f32"),
    ),
    "delay": (
        Named("width", _DIMS, "floats of a row", 1, LIMIT),
        Named("steps", _DIMS + 1, "time steps that the first row looks back", 1, LIMIT),
        Named("slots", _DIMS + 2, "time steps that are kept", 0, LIMIT),
        Named("apart", _STRIDES_A, "time steps from a row to the next, later one"),
    ),
    "delta": (
        Named("key", _DIMS, "floats of a query and of a key", 1, LIMIT),
        Named("value", _DIMS + 1, "floats of a value", 1, LIMIT),
        Named("key_heads", _DIMS + 2, "heads of queries and keys; each serves rows / key_heads values", 1, LIMIT),
        Named("scale", _ALPHA, "factor on the queries", type="f32"),
    ),
}  # fmt: skip
_TEXT = ("runs_all_samples", "knows_positions")
OPERATIONS = (
    Operation("linear", "linear", "linear", "run_linear", "product", "unary", ("ends_in_function",)),
    Operation("linear_q", "linear", "linear", "run_linear", "product", "unary", ("ends_in_function",)),
    Operation("quantize", "quantize", "quantize", "quantize", "rows"),
    Operation("unary", "map", "map", "map", "rows", "unary", ("in_place", "has_axes", "ends_in_function")),
    Operation("binary", "map", "map", "map", "rows", "binary", ("in_place", "has_axes")),
    Operation("softmax", "norm", "norm", "softmax", "rows", "", ("in_place",), ("exp",), flash=300),
    Operation("layernorm", "norm", "norm", "norm", "rows", "", ("in_place",), flash=200),
    Operation("rmsnorm", "norm", "norm", "norm", "rows", "", ("in_place",), flash=200),
    Operation("reduce", "reduce", "reduce", "reduce", "rows", "reduce", ("reads_once",), flash=100),
    Operation("loop", "loop", "loop", "", "loop"),
    Operation("moe", "moe", "moe", "run_moe", "moe", "", ("runs_all_samples",), flash=1000),
    Operation("embed", "embed", "embed", "embed", "batch", "", ("runs_all_samples",), flash=200),
    Operation("rope", "rope", "rope", "rope", "batch", "", (*_TEXT, "in_place"), flash=200),
    Operation("cache", "attention", "cache", "cache", "batch", "cache", (*_TEXT, "keeps_cache"), flash=500),
    Operation("attention", "attention", "attention", "attention", "batch", "cache",
              (*_TEXT, "keeps_cache", "reads_kept"), ("exp",), flash=2500),
    Operation("delay", "delay", "delay", "delay", "batch", "", (*_TEXT, "stores_first"), flash=100),
    Operation("delta", "delta", "delta", "delta", "batch", "", _TEXT, flash=500),
)  # fmt: skip
OPCODES = tuple(operation.name for operation in OPERATIONS)
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def operation(name: str) -> Operation:
    """The operation of this name; raises KeyError where there is none."""
    return _BY_NAME[name]


def named(record: Any) -> Any:
    """An operation's record with its words by their own names; what is written there is written to the record."""
    return record.view(OPERATIONS[int(record["code"])].dtype)


def named_all(records: Any, name: str) -> Any:
    """Copies of all records of one operation, likewise."""
    return records[records["code"] == OPCODES.index(name)].view(_BY_NAME[name].dtype)


def operations(walk: str = "", trait: str = "") -> tuple[Operation, ...]:
    """The operations with this walk, or this trait."""
    return tuple(o for o in OPERATIONS if walk in ("", o.walk) and trait in ("", *o.traits))


# Ranges of fields that are proven one by one; those of an operation's words are in VIEWS. What is reserved is 0.
RANGES: dict[str, dict[str, tuple[int, int]]] = {
    "header": {"max_batch": (1, NONE), "input_floats": (1, NONE), "output_floats": (1, NONE), "inputs": (1, NONE),
               "outputs": (1, NONE), "experts": (0, LIMIT), "context_tokens": (0, LIMIT), "reserved": (0, 0)},
    "port": {"rank": (0, 6)},
    "operand": {"sample_stride": (0, LIMIT), "row_stride": (0, LIMIT), "step_stride": (0, LIMIT)},
    "tensor": {"rows": (1, LIMIT), "cols": (1, LIMIT)},
    "expert": {"reserved": (0, 0)},
    "layer": {
        "experts": (1, MAX_EXPERTS), "k": (1, LIMIT), "score": (0, len(SCORES) - 1),
        "normalize": (0, len(NORMALIZE) - 1), "d_in": (1, LIMIT), "d_out": (1, LIMIT), "tile": (1, EXPERT_TILE),
        "groups": (1, LIMIT), "kept_groups": (1, LIMIT), "group_rule": (0, len(GROUP_RULES) - 1),
        "capacity": (0, LIMIT), "apply": (0, len(APPLY) - 1), "quantized": (0, LIMIT // 2),
    },
}  # fmt: skip

RECORDS = {r.name: r for r in (HEADER, PORT, OPERAND, OP, TENSOR, LAYER, EXPERT, GOLDEN)}

ENUMS: dict[str, Sequence[str]] = {
    "op": OPCODES, "space": SPACES, "layout": LAYOUTS, "scope": SCOPES, "unary": UNARY, "binary": BINARY,
    "reduce": REDUCE, "score": SCORES, "normalize": NORMALIZE, "group_rule": GROUP_RULES, "apply": APPLY,
    "cache": CACHES, "mask": MASKS,
}  # fmt: skip

LIMITS = {
    "FORMAT_VERSION": FORMAT_VERSION, "ALIGN_MODEL": ALIGN_MODEL, "ALIGN_CONTEXT": ALIGN_CONTEXT,
    "ALIGN_BUFFER": ALIGN_BUFFER, "HEAD_BYTES": HEAD_BYTES, "EXPERT_TILE": EXPERT_TILE, "LANES": LANES,
    "GROUP": GROUP, "PAGE": PAGE, "ACTIVATION_GROUP": ACTIVATION_GROUP, "WEIGHT_GROUP": WEIGHT_GROUP, "LIMIT": LIMIT,
    "MAX_BATCH": MAX_BATCH, "MAX_META": MAX_META, "MAX_EXPERTS": MAX_EXPERTS, "CELL_ROWS": CELL_ROWS,
    "CELL_COLS": CELL_COLS,
}  # fmt: skip


def align(n: int, to: int) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


def error_code(name: str) -> int:
    """The number of an engine error, by its name without the prefix."""
    return next(n for n, (known, _) in enumerate(ERRORS) if known == name)


def error_text(code: int) -> str:
    """The name and sentence of an engine error code."""
    name, text = ERRORS[code]
    return f"COLIBRI_{'OK' if name == 'OK' else f'ERR_{name}'}: {text}"
