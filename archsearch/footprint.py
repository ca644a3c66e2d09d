"""What a run takes of host memory, GPU memory and disk, estimated from sizes alone.

Legend: HD is num_heads * head_dim, the width of all head outputs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import RunConfig
from .evaluation.divergence import LOGIT_BYTES
from .models.teacher import TeacherInfo
from .search.final import final_config
from .search.trial import EVALUATION_TOKENS
from .training.teacher_logits import FORMS

TRAIN = "train"
"""The value of supernet.source that trains a supernet in the run."""

MIB, GIB = 1024**2, 1024**3
PROCESS_BYTES = {"cpu": 600 * MIB, "cuda": 2 * GIB}
"""Host memory of Python with torch and transformers loaded, by the teacher's device."""
CONTEXT_BYTES = 600 * MIB
"""GPU memory of one process before it holds anything."""
LOGIT_COPIES = 3
"""Chunks of fp32 logits that are alive at once."""
EVALUATED_BYTES = 140
"""Bytes a token and number of HD that a forward of an all-GDN model takes (142 measured, SmolLM2's layers)."""
TRAINED_BYTES = 90
"""The same for each layer of a candidate in distillation, half of whose heads are twins: all twins take twice that
(180 measured, SmolLM2's layers), full attention hardly any."""
ALIGNED_BYTES = 2 * TRAINED_BYTES
"""The same in the alignment, which holds the graph of one layer at a time."""


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a run. gpu is over all processes and GPUs together; 0 on a CPU."""

    host: int
    gpu: int
    disk: int


def footprint(
    config: RunConfig, info: TeacherInfo, device: str, *, searches: bool = True
) -> Footprint:
    """What the run takes, or its stages before the search; device is "cpu" or "cuda"."""
    workers = config.execution.workers if searches and config.execution.executor == "ray" else 0
    # Stages before the search run in this process, which lets go of its models before the workers come.
    trials = (workers or 1) * worker_bytes(config, info, device) if searches else 0
    model = max(_scoring_bytes(config, info), trials)
    processes = (1 + workers + (1 if workers else 0)) * PROCESS_BYTES[device]
    disk = _disk_bytes(config, info, searches=searches)
    if device == "cpu":
        return Footprint(model + processes, 0, disk)
    # Weights pass through host memory on their way.
    loading = (workers or 1) * 2 * teacher_bytes(config, info)
    return Footprint(processes + loading, model + (workers + 1) * CONTEXT_BYTES, disk)


def worker_bytes(config: RunConfig, info: TeacherInfo, device: str) -> int:
    """What a trial worker holds: teacher, twins, and a candidate's evaluation or distillation, whichever is more."""
    data, width = config.data, _width(info)
    used = [part.data for part in (config, final_config(config)) if part is not None]
    sequences = sum(count for part in used for _, count in part.heldout_texts)
    heldout = sequences * data.sequence_length
    # Beside the head in fp32, the reference is the teacher's hidden states and the rows that it expects.
    reference = heldout * info.hidden_size * (4 + _element_bytes(config))
    head = 4 * info.vocab_size * info.hidden_size
    # A prompt that is longer than a batch may be still runs alone.
    forward = max(EVALUATION_TOKENS[device], *config.probes.contexts)
    evaluation = forward * width * EVALUATED_BYTES
    evaluation += LOGIT_COPIES * LOGIT_BYTES[device]
    distillation = 0
    if max(config.search.lengths):
        # fp32 weights, gradients and two moments.
        distillation = 4 * 4 * _twin_parameters(info)
        # With checkpointing the graph is that of one layer, beside every layer's input.
        layers = 1 if config.distill.checkpointing else info.shape.num_layers
        inputs = info.shape.num_layers * info.hidden_size * _element_bytes(config)
        graph = layers * width * TRAINED_BYTES + (inputs if layers == 1 else 0)
        distillation += max(data.sequence_length, config.distill.batch_tokens) * graph
        distillation += min(answer_bytes(config, info), round(config.distill.cache_gib * GIB))
    held = teacher_bytes(config, info) + 4 * _twin_parameters(info) + reference + head
    return held + max(evaluation, distillation)


def answer_bytes(config: RunConfig, info: TeacherInfo) -> int:
    """What a worker's candidates share of the teacher's answers to the batches of the longest proxy."""
    distill = config.distill
    if distill.teacher_logits == "exact":
        return 0
    form = FORMS[distill.teacher_logits]
    a_token = form.bytes_a_token(info.hidden_size, _element_bytes(config), distill.top_k)
    return max(config.search.lengths) * a_token


def teacher_bytes(config: RunConfig, info: TeacherInfo) -> int:
    """The teacher's weights."""
    return info.num_parameters * _element_bytes(config)


def checkpoint_bytes(config: RunConfig, info: TeacherInfo) -> int:
    """What one distillation keeps on disk to go on from: weights and two moments in fp32."""
    every = config.distill.trainable == "all"
    return 3 * 4 * (info.num_parameters if every else _twin_parameters(info))


def _scoring_bytes(config: RunConfig, info: TeacherInfo) -> int:
    """The larger of alignment and scores, beside a process's own."""
    twins = 4 * _twin_parameters(info)
    held = teacher_bytes(config, info) + twins
    aligning = 0
    if config.supernet.source == TRAIN:
        aligning = 3 * twins + config.supernet.batch_tokens * _width(info) * ALIGNED_BYTES
    scoring = config.scoring
    # One layer's heads and groups, each swapped alone, is the most that is ever run at once.
    swaps = info.shape.num_heads + info.shape.num_kv_heads
    longest = max(*scoring.contexts, scoring.replacement_length)
    pieces = swaps * longest * _width(info) * EVALUATED_BYTES
    return held + max(aligning, min(pieces, round(scoring.memory_gib * GIB)))


def _disk_bytes(config: RunConfig, info: TeacherInfo, *, searches: bool) -> int:
    twins = 4 * _twin_parameters(info)
    checkpoint = 3 * twins if config.supernet.source == TRAIN else 0
    # A distilled candidate is stored in fp16; later rungs take some third of them.
    stored = config.search.trials if config.search.proxy_tokens[0] else config.search.trials // 3
    distilled = stored * twins // 2 if searches and max(config.search.lengths) else 0
    if config.distill.decay_share < 1 and len([n for n in config.search.lengths if n]) > 1:
        # With the weights from before the rate fell.
        distilled *= 2
    beyond = answer_bytes(config, info) - round(config.distill.cache_gib * GIB)
    answers = max(0, beyond) if searches else 0
    return checkpoint + twins + distilled + answers + 64 * MIB


def _element_bytes(config: RunConfig) -> int:
    return 4 if config.teacher.dtype == "float32" else 2


def _width(info: TeacherInfo) -> int:
    return info.shape.num_heads * info.shape.head_dim


def _twin_parameters(info: TeacherInfo) -> int:
    # q, k, v and the output gate, each hidden_size x HD a layer.
    return 4 * info.hidden_size * _width(info) * info.shape.num_layers
