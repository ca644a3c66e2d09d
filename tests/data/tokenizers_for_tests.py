"""Small tokenizers of different habits with numbers, built in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from random import Random

from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from archsearch.data import general, prompts, scenes
from archsearch.data.lexicon import pieces
from archsearch.data.niah import KEYS, haystack_sentences, needle, question, vocabulary
from archsearch.models.teacher import byte_tokenizer


def probe_words() -> list[str]:
    """Every piece that a prompt of any kind can hold, digits aside: all in the sources, and plurals."""
    texts = [inspect.getsource(module) for module in (general, scenes, prompts)]
    words = {piece for text in texts for piece in pieces(text) if not piece.isdigit()}
    people = {noun for pair in general.SUBJECTS for noun in pair}
    return sorted({*vocabulary(), *words, *people, *(f"{word}s" for word in general.ATTRACTORS)})


def word_tokenizer(
    digits: int = 1, *, bos: bool = True, numbers: bool = True, general_words: bool = False
) -> PreTrainedTokenizerBase:
    """A token a word and a token for each run of up to `digits` digits; without numbers they are <unk>.

    It knows the words of the filler, of single-key needles and their questions, and if asked all others.
    """
    values = [f"{n:0{size}d}" for size in range(1, digits + 1) for n in range(10**size)]
    known = probe_words() if general_words else vocabulary()
    words = ["<bos>", "<eos>", "<unk>", *known, *(values if numbers else [])]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    pattern = Regex(rf"[A-Za-z]+|[0-9]{{1,{digits}}}|[^A-Za-z0-9\s]")
    core.pre_tokenizer = Sequence([Split(Regex(r"\s+"), "removed"), Split(pattern, "isolated")])
    names = {"unk_token": "<unk>", "eos_token": "<eos>"}
    if bos:
        names["bos_token"] = "<bos>"
        core.post_processor = TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def merging_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-pair encoding that also merges digits with each other and with spaces, unevenly."""
    rng = Random(0)
    texts = [*islice(haystack_sentences(rng), 300), *map(question, KEYS)]
    texts += [needle(key, str(rng.randrange(10**6, 10**7))) for key in KEYS for _ in range(4)]
    core = Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def unary_tokenizer() -> PreTrainedTokenizerBase:
    """Words as word_tokenizer has them, but as many tokens for a digit as it says: no two take equally many."""
    tokenizer = word_tokenizer(general_words=True)
    tokenizer.add_tokens(["#"])
    digits = [normalizers.Replace(str(digit), "#" * digit) for digit in range(10)]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(digits)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "word": lambda: word_tokenizer(general_words=True),
    "word without bos": lambda: word_tokenizer(bos=False, general_words=True),
    "digits by threes": lambda: word_tokenizer(3, general_words=True),
    "merging": merging_tokenizer,
    "bytes": byte_tokenizer,
}
