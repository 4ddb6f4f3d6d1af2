"""Trains the storyteller: writes checkpoint/ (a Hugging Face directory), result.json and validation.txt beside itself.

Run `python examples/storyteller/train.py`; takes the better part of an hour on two cores. The checkpoint is rewritten
every few minutes on the way. The model is an OLMoE (Muennighoff et al. 2024, arXiv:2409.02060) in small.

Two processes of one thread each share every batch and average their gradients: with operations this small that is
faster than two threads in one process, and does not stall when other programs want the cores too.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, distributed, multiprocessing, nn
from transformers import GenerationConfig, OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"

VOCABULARY, CONTEXT = 2048, 512
WORKERS, SEQUENCES = 2, 2  # sequences of one worker in a step
SEED, STEPS, WARM_UP, COOL_DOWN = 0, 2_700, 200, 800
STEP_TOKENS = WORKERS * SEQUENCES * CONTEXT
LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP, BALANCE = 3e-3, 0.1, (0.9, 0.95), 1.0, 0.01
REPORT_STEPS, EVALUATE_STEPS, SAVE_SECONDS = 100, 500, 300.0
SAMPLES, SAMPLE_TOKENS, TEMPERATURE, TOP_K = range(4), 160, 0.8, 40


def train_tokenizer(documents: list[corpus.Document]) -> Tokenizer:
    """A byte-level BPE of VOCABULARY tokens, the first of them the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[corpus.END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def build() -> OlmoeForCausalLM:
    """The untrained model."""
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=5,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.04,
        router_aux_loss_coef=BALANCE,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    # On a CPU the grouped multiplication is the faster of transformers' implementations, and float32 than bfloat16.
    return OlmoeForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation="grouped_mm")


def batches(documents: list[Tensor], worker: int) -> Iterator[Tensor]:
    """Endless (SEQUENCES, CONTEXT) of token ids: in every epoch the documents, then their pieces, in a new order."""
    generator = torch.Generator().manual_seed(SEED)  # the same order in every worker
    together = WORKERS * SEQUENCES
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        stream = torch.cat([documents[i] for i in order])
        pieces = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        pieces = pieces[torch.randperm(len(pieces), generator=generator)]
        for start in range(0, len(pieces) - together + 1, together):
            yield pieces[start + worker * SEQUENCES :][:SEQUENCES]


def load_balance(logits: Tensor, k: int) -> Tensor:
    """Switch Transformer's auxiliary loss E · Σ f_e · P_e of one layer's (tokens, E): 1 where experts share equally."""
    tokens, experts = logits.shape
    chosen = logits.topk(k, dim=-1).indices
    fraction = torch.bincount(chosen.flatten(), minlength=experts) / (tokens * k)
    return experts * (fraction * logits.softmax(dim=-1).mean(dim=0)).sum()


def losses(model: OlmoeForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats of each next token of (sequences, length), and the mean load balance of the layers."""
    output = model(input_ids=tokens, output_router_logits=True, use_cache=False)
    nothing = tokens.new_full((len(tokens), 1), -100)  # the target that does not count; cheaper than slicing the logits
    targets = torch.cat([tokens[:, 1:], nothing], dim=1)
    entropy = nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    k = model.config.num_experts_per_tok
    balance = torch.stack([load_balance(logits.flatten(0, -2), k) for logits in output.router_logits]).mean()
    return entropy, balance


@torch.no_grad()
def evaluate(model: OlmoeForCausalLM, tokens: Tensor) -> tuple[float, Tensor]:
    """Nats of all of a text's tokens (the first a document's end, given) and the choices (layers, experts) it caused.

    Read in windows of CONTEXT that share one token, so that each token is predicted once.
    """
    model.eval()
    config = model.config
    nats, load = 0.0, torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    for start in range(0, len(tokens) - 1, CONTEXT - 1):
        window = tokens[None, start : start + CONTEXT]
        output = model(input_ids=window, output_router_logits=True, use_cache=False)
        nats += float(nn.functional.cross_entropy(output.logits[0, :-1].float(), window[0, 1:], reduction="sum"))
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.flatten(0, -2).topk(config.num_experts_per_tok, dim=-1).indices
            load[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    model.train()
    return nats, load


@torch.no_grad()
def sample(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """What the model writes after a prompt, both as text."""
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt)])
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": SAMPLE_TOKENS}
    model.eval()
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    model.train()
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW that lets the norms' weights alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def schedule(step: int) -> float:
    """The share of LEARNING_RATE at a step: a linear rise, a plateau, a linear fall to a hundredth."""
    rise, fall = (step + 1) / WARM_UP, (STEPS - step) / COOL_DOWN
    return max(min(rise, 1.0, fall), 0.01)


def save(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> OlmoeForCausalLM:
    """Write the checkpoint in float16; the model as a reader gets it, in float32 again."""
    half = OlmoeForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(CHECKPOINT)
    GenerationConfig(eos_token_id=0, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K).save_pretrained(CHECKPOINT)
    tokenizer.save_pretrained(CHECKPOINT)
    return OlmoeForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, experts_implementation="grouped_mm")


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients by their mean over the workers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= WORKERS
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


@dataclass(frozen=True)
class Data:
    """What every worker is given."""

    tokenizer: str  # as JSON
    documents: list[NDArray[np.uint16]]  # one after the other they are an epoch
    validation: NDArray[np.uint16]  # an end of document, then the validation text
    validation_bytes: int  # without the marks between documents

    def bits_per_byte(self, nats: float) -> float:
        """Of the validation text, whose tokens cost `nats` altogether."""
        return nats / math.log(2) / self.validation_bytes


def prepare() -> Data:
    """Fetch the text, write validation.txt, train the tokenizer."""
    training, held_out = corpus.split()
    validation = corpus.join(held_out)
    corpus.VALIDATION.write_text(validation, encoding="ascii")
    tokenizer = train_tokenizer(training)
    encoded = tokenizer.encode_batch([document.text + corpus.END for document in training])
    return Data(
        tokenizer.to_str(),
        [np.array(document.ids, np.uint16) for document in encoded],
        np.array(tokenizer.encode(corpus.END + validation).ids, np.uint16),
        len(validation.replace(corpus.END, "")),
    )


def worker(rank: int, meeting: str, data: Data) -> None:
    """Train with the other workers; the first one also reports, saves and writes the result."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    first = rank == 0
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(data.tokenizer),
        eos_token=corpus.END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    validation = torch.from_numpy(data.validation.astype(np.int64))
    model = build()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    source = batches([torch.from_numpy(document.astype(np.int64)) for document in data.documents], rank)

    curve: list[dict[str, float]] = []
    sums = torch.zeros(2)
    started = saved = time.monotonic()
    model.train()
    for step in range(1, STEPS + 1):
        tokens = next(source)
        if step <= STEPS - COOL_DOWN:  # attention costs most: read in halves at first, learn the full context last
            tokens = tokens.view(-1, CONTEXT // 2)
        entropy, balance = losses(model, tokens)
        optimizer.zero_grad()
        (entropy + BALANCE * balance).backward()  # type: ignore[no-untyped-call]
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        sums += torch.stack([entropy.detach(), balance.detach()])
        if first and step % REPORT_STEPS == 0:
            seconds = time.monotonic() - started
            mean_entropy, mean_balance = (sums / REPORT_STEPS).tolist()
            sums.zero_()
            line = f"step {step:5}  {seconds:5.0f} s  loss {mean_entropy:.3f}  balance {mean_balance:.3f}"
            if step % EVALUATE_STEPS == 0:
                nats, _ = evaluate(model, validation)
                loss = nats / (len(validation) - 1)
                curve.append(
                    {
                        "step": step,
                        "tokens": step * STEP_TOKENS,
                        "seconds": round(seconds),
                        "training_loss": round(mean_entropy, 4),
                        "validation_loss": round(loss, 4),
                    }
                )
                line += f"  validation {loss:.3f} ({data.bits_per_byte(nats):.3f} bits per byte)"
            print(line, flush=True)
        if first and time.monotonic() - saved > SAVE_SECONDS:
            save(model, tokenizer)
            saved = time.monotonic()
    if first:
        summary = {"seconds": round(time.monotonic() - started), "curve": curve}
        conclude(save(model, tokenizer), tokenizer, data, summary)
    distributed.barrier()
    distributed.destroy_process_group()


def active_parameters(model: OlmoeForCausalLM) -> int:
    """How many parameters one token passes through: all of them but the experts it is not sent to."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    return total - experts + experts * model.config.num_experts_per_tok // model.config.num_experts


def conclude(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Data, summary: dict[str, Any]) -> None:
    """Measure the checkpoint as saved, print the figures and write result.json."""
    nats, load = evaluate(model, torch.from_numpy(data.validation.astype(np.int64)))
    tokens, loss = len(data.validation) - 1, nats / (len(data.validation) - 1)
    result: dict[str, Any] = {
        "seed": SEED,
        "steps": STEPS,
        "tokens": STEPS * STEP_TOKENS,
        "epochs": round(STEPS * STEP_TOKENS / sum(map(len, data.documents)), 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "active_parameters": active_parameters(model),
        **summary,
        "validation": {
            "tokens": tokens,
            "bytes": data.validation_bytes,
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": data.bits_per_byte(nats),
            "perplexity_per_byte": 2 ** data.bits_per_byte(nats),
        },
        "expert_choices": load.tolist(),  # (layers, experts) over the validation text
        "samples": [sample(model, tokenizer, corpus.END, seed) for seed in SAMPLES],
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")

    figures = result["validation"]
    print(f"\nvalidation, as saved: loss {loss:.4f}, perplexity {figures['perplexity']:.2f} per token")
    print(f"{figures['bits_per_byte']:.4f} bits, perplexity {figures['perplexity_per_byte']:.4f} per byte")
    for layer, row in enumerate((load / load.sum(dim=1, keepdim=True)).tolist()):
        print(
            f"layer {layer}: " + " ".join(f"{100 * part:4.1f}" for part in sorted(row, reverse=True)) + " % of choices"
        )
    for seed, text in zip(SAMPLES, result["samples"], strict=True):
        print(f"\n--- seed {seed}\n{text}")
    if load.min() == 0:
        raise RuntimeError("there is an expert that nothing is sent to")


def main() -> None:
    """Prepare the data and let the workers train."""
    data = prepare()
    epoch = sum(map(len, data.documents))
    print(f"{epoch:,} tokens to learn from, {len(data.validation) - 1:,} held out ({data.validation_bytes:,} bytes)")
    model = build()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {active_parameters(model):,} active; ", end="")
    print(f"{STEPS:,} steps of {STEP_TOKENS:,} tokens", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (f"{folder}/meeting", data), nprocs=WORKERS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
