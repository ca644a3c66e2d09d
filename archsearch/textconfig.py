"""The sections of a config that say what text a run reads and what candidates are asked; config.py has the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .metrics import LABEL, ProbeKind, RetrievalKind, is_reserved

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Label = Annotated[str, Field(pattern=LABEL)]
"""A name that becomes part of a metric's."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced between kinds."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TextConfig(Section):
    """Where token sequences come from."""

    source: Literal["teacher", "file", "datasets", "docstrings"] = "teacher"
    """Drawn from the teacher at temperature 1; a file; a name for the `datasets` package; or the docstrings of the
    Python that runs this, which no model has drawn."""
    path: str | None = None
    """file: .txt, .jsonl or .parquet (column `text`), or .npy of token ids [sequences, tokens]; `package:` works."""
    name: str | None = None
    """datasets: `NAME` or `NAME:CONFIG`."""
    split: str = "train"
    column: str = "text"
    temperature: Rate = 1.0

    @model_validator(mode="after")
    def _complete(self) -> TextConfig:
        if self.source == "file" and not self.path:
            raise ValueError("source: file needs path")
        if self.source == "datasets" and not self.name:
            raise ValueError("source: datasets needs name")
        return self


class HeldoutConfig(TextConfig):
    """One more held-out text, whose metrics are kl_LABEL and top1_agreement_LABEL."""

    label: Label
    sequences: Positive | None = None
    """Sequences of it; data.heldout_sequences where not given."""


class DataConfig(Section):
    """Token sequences for alignment, distillation and held-out divergence."""

    sequence_length: Positive = 1024
    train: TextConfig = TextConfig()
    heldout: TextConfig = TextConfig()
    heldout_sequences: Positive = 8
    extra_heldout: tuple[HeldoutConfig, ...] = ()
    """Other texts to measure divergence on, such as one that was not drawn from the teacher."""
    overlap: Literal["refuse", "drop"] = "refuse"
    """What happens where training text that a file or a data set gives shares a passage with held-out text: an error,
    or its sequences are left out. Sequences drawn from the teacher always are."""
    max_train_sequences: Positive | None = None
    """Most distinct training sequences to draw or read; longer training goes over them again."""
    niah_share: Share = 0.25
    """Share of the training sequences that are retrieval prompts instead of text."""
    niah_text_share: Share = 0.0
    """Share of those prompts that hide their needles in the training text; the others hide them in generated sentences."""

    @property
    def heldout_texts(self) -> list[tuple[TextConfig, int]]:
        """The held-out texts and how many sequences of each a trial reads, heldout first."""
        extra = [(text, text.sequences or self.heldout_sequences) for text in self.extra_heldout]
        return [(self.heldout, self.heldout_sequences), *extra]

    @model_validator(mode="after")
    def _labelled(self) -> DataConfig:
        labels = [text.label for text in self.extra_heldout]
        if len(set(labels)) < len(labels):
            raise ValueError("extra_heldout gives two texts the same label")
        return self


class ProbeFile(Section):
    """Prompts from a file, whose metrics are NAME_nll and NAME_match."""

    name: Label
    path: Annotated[str, Field(min_length=1)]
    """JSONL (also .jsonl.gz), an object a line: prompt, answer and optionally kind and keys; `package:` works."""

    @model_validator(mode="after")
    def _free(self) -> ProbeFile:
        if is_reserved(self.name):
            raise ValueError(
                f"name: {self.name!r} is what other metrics are called; allowed: another name"
            )
        return self


class ProbeConfig(Section):
    """The prompts that every trial answers; digits and multi_keys also shape those of scores and training."""

    kinds: Annotated[tuple[ProbeKind, ...], Field(min_length=1)] = ("single", "multikey")
    """Each gives a metric KIND_nll and KIND_match (with niah_ before needles); general_nll and general_match are
    the means over the general ones."""
    contexts: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1024,)
    """Lengths in tokens of retrieval prompts; general ones have their own, of 50 to 400. Several also give
    NAME_nll@CONTEXT and NAME_match@CONTEXT."""
    beyond_window: bool = False
    """Lets contexts, and the prompts of files, be longer than the teacher's window."""
    unseen: tuple[RetrievalKind, ...] = ()
    """Kinds of retrieval prompts in words and of values that no training prompt has: unseen_KIND_nll and _match."""
    files: tuple[ProbeFile, ...] = ()
    multi_keys: Annotated[int, Field(ge=2)] = 4
    """Needles in a prompt of several; a single-key prompt has one."""
    digits: Annotated[int, Field(ge=1, le=12)] = 7
    """Length of the number that is the needle's value."""
    prompts: Positive = 8
    """Evaluation prompts of each kind (retrieval: at each context)."""

    @model_validator(mode="after")
    def _distinct(self) -> ProbeConfig:
        for field in ("kinds", "unseen", "contexts"):
            if len(set(getattr(self, field))) < len(getattr(self, field)):
                raise ValueError(
                    f"{field} names a {'length' if field == 'contexts' else 'kind'} twice"
                )
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("files gives two files the same name")
        return self


class HarnessConfig(Section):
    """Tasks of lm-eval that every trial is measured on: metrics lm_TASK_METRIC."""

    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tasks, of lm-eval's own or of include_path."""
    include_path: str | None = None
    """A folder of task files of your own; `package:` works."""
    limit: Positive | None = None
    """Examples of each task; all where not given."""
    num_fewshot: NonNegative | None = None
    """Solved examples before each question; the task's own number where not given."""
    batch_size: Positive = 8
    max_length: Positive | None = None
    """Tokens beyond which a question loses its beginning; the teacher's window where not given."""
    trust_remote_code: bool = False
    """Lets tasks run code that comes with a data set, or that a model has written."""
