"""Turns the recipe's `[data]` section into prompts: reads, checks, cleans and renders problems, and notes what is left
out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.fields import row_arguments, unread_fields
from mugrpo_megatron.data.problems import generated_sets, held_out_sets, load
from mugrpo_megatron.data.prompts import (
    FittingPrompts,
    first_prompt,
    fitting_prompts,
    fitting_prompts_by_set,
    rendered,
    template_of,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.gold_check import unusable_golds
from mugrpo_megatron.samples import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # imported for the type alone: it takes a second

NGRAM = 8
"""Number of words of an n-gram."""
OVERLAP = 0.5
"""A training problem that shares at least this fraction of an evaluation problem's n-grams counts as the same
problem."""

_LATEX = re.compile(r"\\(?:left|right|displaystyle|text|mathrm|[dt]?frac|[,;:! ])|[\\${}~]")
_WORD = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?|[^\sa-z0-9]")
_PUNCTUATION = frozenset(".,;:?!'\"`()[]")


@dataclass(frozen=True, slots=True)
class Contamination:
    """A pair of a training problem and an evaluation problem that count as the same."""

    train: Problem
    held_out: Problem
    overlap: float
    """Fraction of the evaluation problem's n-grams in the training problem; 1 for equal texts."""


def words(text: str) -> tuple[str, ...]:
    """The words of a question without its case, punctuation and LaTeX layout; operators and digits stay."""
    tokens = _WORD.findall(_LATEX.sub(" ", text.lower()))
    return tuple(word for word in tokens if word not in _PUNCTUATION)


def without_duplicates(problems: Sequence[Problem]) -> tuple[list[Problem], list[str]]:
    """Keep the first of equal problems; also return a sentence for each copy whose answer differs from that of the
    problem that is kept.

    Two problems are copies if they have the same `words`, and also the same answer or the same text up to case, spaces
    and punctuation at the end. The fields that a chat template may use must be equal too.
    """
    # Equal words alone do not make a copy: `5!` and `5`, or `f'(x)` and `f(x)`, have equal words and different answers.
    alike: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    distinct: list[Problem] = []
    disagreements: list[str] = []
    for problem in problems:
        others = alike[words(problem.question)]
        first = next((other for other in others if _is_copy(problem, other)), None)
        if first is None:
            others.append(problem)
            distinct.append(problem)
        elif first.answer != problem.answer:
            disagreements.append(
                f"{problem.id}: same question as {first.id} but answer {problem.answer!r}, not {first.answer!r}"
            )
    return distinct, disagreements


def _is_copy(problem: Problem, other: Problem) -> bool:
    if row_arguments(problem.row) != row_arguments(other.row) or _fields(problem) != _fields(other):
        return False
    return problem.answer == other.answer or _spelled(problem) == _spelled(other)


def _fields(problem: Problem) -> list[dict[str, object]]:
    """The fields of each message besides role and content; a message without such fields is left out."""
    fields = [{k: v for k, v in m.items() if k not in ("role", "content")} for m in problem.messages]
    return [entry for entry in fields if entry]


def _spelled(problem: Problem) -> str:
    """The question as lower-case text without spaces and without punctuation at its end."""
    return "".join(problem.question.lower().split()).rstrip(".,;:?")


def contamination(train: Sequence[Problem], held_out: Sequence[Problem]) -> list[Contamination]:
    """Find training problems that share at least OVERLAP of an evaluation problem's n-grams.

    A problem of fewer than NGRAM words matches only one that consists of the same words in the same order.
    """
    grams = [_ngrams(words(problem.question)) for problem in held_out]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, problem_grams in enumerate(grams):
        for gram in problem_grams:
            holders[gram].append(index)
    overlaps = []
    for problem in train:
        hits = Counter(index for gram in _ngrams(words(problem.question)) for index in holders.get(gram, ()))
        fractions = [(count / len(grams[index]), -index) for index, count in hits.items()]
        if fractions and max(fractions)[0] >= OVERLAP:
            fraction, negative_index = max(fractions)
            overlaps.append(Contamination(problem, held_out[-negative_index], fraction))
    return overlaps


def _ngrams(text: tuple[str, ...]) -> set[tuple[str, ...]]:
    """All n-grams of NGRAM words; a text with fewer words is its own single n-gram."""
    return {text[i : i + NGRAM] for i in range(max(1, len(text) - NGRAM + 1))}


MOST_NAMED = 3
"""Most sentences of one kind, such as about golds or overlaps, that the notes list; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Usable problems, and notes about the data: how rows were read, and what is left out."""

    train: list[Problem]
    held_out: list[Problem]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Training and held-out problems with their prompts, and notes about the data."""

    train: FittingPrompts
    held_out: FittingPrompts
    """Problems of all sets, concatenated; a problem's `source` is its set's name."""
    notes: list[str]
    """Sentences about how rows were read, what was left out and what looks wrong, and the first prompt."""


def prepare(
    data: DataSection, reward: RewardSection, tokenizer: PreTrainedTokenizerBase, problems: Problems | None = None
) -> PreparedData:
    """Render training and held-out problems as prompts; the problems are read first unless they are given.

    Raises UserError for data without usable problems, if all prompts of a set are too long, and with `data.strict` for
    any unusable row or gold.
    """
    problems = problems or read_problems(data, reward)
    notes = list(problems.notes)
    template = template_of(data)
    rendering = data.prompt_style, data.max_prompt_tokens, template
    fits = (
        fitting_prompts(problems.train, tokenizer, *rendering),
        fitting_prompts_by_set(problems.held_out, tokenizer, *rendering),
    )
    shown = partial(rendered, tokenizer=tokenizer, style=data.prompt_style, template=template)
    notes += unread_fields([*problems.train, *problems.held_out], shown)
    for name, fit in zip(("training", "held-out"), fits, strict=True):
        if fit.too_long:
            notes.append(f"{fit.too_long} {name} prompts are longer than data.max_prompt_tokens: left out")
    if fits[0].prompts:
        notes.append(first_prompt(tokenizer, fits[0].prompts[0], data.prompt_style, template))
    return PreparedData(*fits, notes)


def read_problems(data: DataSection, reward: RewardSection) -> Problems:
    """Read, check and clean the problems; imports no tokenizer, and not the parser with which the verifier compares
    answers.

    Raises UserError for data without usable problems, and with `data.strict` for any malformed row or unusable gold.
    """
    notes: list[str] = []
    held_out = held_out_problems(data.eval, data, reward, notes)
    train = usable_problems(data.train, "train", data, reward, notes)
    # Generated sets are not cleaned: they repeat training questions on purpose, and their splits are disjoint.
    generators = generated_sets(data.train)
    generated, read = ([p for p in train if (p.source in generators) is is_task] for is_task in (True, False))
    distinct, disagreements = without_duplicates(read)
    notes += _few(disagreements)
    if len(distinct) < len(read):
        notes.append(f"{len(read) - len(distinct)} training problems repeat another one's question: left out")
    if data.contamination != "off":
        distinct = _uncontaminated(distinct, held_out, data.contamination == "drop", notes)
    return Problems(generated + distinct, evenly_spaced_by_set(held_out, data.eval_problems, notes), notes)


def held_out_problems(
    sources: str, data: DataSection, reward: RewardSection, notes: list[str], key: str = "data.eval"
) -> list[Problem]:
    """Read the usable problems of all held-out sets. UserError for a set without any, or a set that is named twice."""
    names = held_out_sets(sources, key)
    problems = _each_once(usable_problems(sources, "eval", data, reward, notes), generated_sets(sources), notes)
    for name in names.keys() - {problem.source for problem in problems}:
        raise UserError(
            f"{key}: {names[name]} has no usable problem; data.strict=true says what is wrong with its rows"
        )
    return problems


def _each_once(problems: list[Problem], generated: set[str], notes: list[str]) -> list[Problem]:
    """Remove repeated questions inside each held-out set, since they would count as further problems and make the set's
    interval too narrow. The sets in `generated` stay as they are."""
    sets: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        sets[problem.source].append(problem)
    kept: list[Problem] = []
    for name, members in sets.items():
        distinct, disagreements = (members, []) if name in generated else without_duplicates(members)
        notes += _few(disagreements)
        if len(distinct) < len(members):
            notes.append(
                f"{name}: {len(members) - len(distinct):,} of its {len(members):,} held-out problems repeat another "
                "one's question: left out; eval.samples sets how often each is answered"
            )
        kept += distinct
    return kept


def evenly_spaced_by_set(problems: list[Problem], limit: int, notes: list[str]) -> list[Problem]:
    """At most `limit` problems of every data set, evenly spaced and in their order; adds a note for each set with
    more."""
    # Not the first ones: many sets are sorted by subject or difficulty, so their first problems are not representative.
    sizes = Counter(problem.source for problem in problems)
    for name, size in sizes.items():
        if size > limit:
            notes.append(
                f"{name}: {limit:,} of its {size:,} held-out problems are used, evenly spaced; "
                "data.eval_problems sets how many"
            )
    seen = Counter[str]()
    sample = []
    for problem in problems:
        size, index = sizes[problem.source], seen[problem.source]
        seen[problem.source] += 1
        if size <= limit or (index * limit) // size != ((index - 1) * limit) // size:
            sample.append(problem)
    return sample


def usable_problems(
    source: str, split: Literal["train", "eval"], data: DataSection, reward: RewardSection, notes: list[str]
) -> list[Problem]:
    """Read the problems of well-formed rows whose golds can be used for scoring (`unusable_golds`).

    Adds a sentence to `notes` for each row that is left out as malformed or for its gold, up to MOST_NAMED of a kind,
    and one that counts the training rows outside `data.pass_rate`. With `data.strict` a malformed row or an unusable
    gold raises UserError instead. If `source` is a single bundled task, its golds are not checked.
    """
    any_gold = cache(reward.accepts_any_gold)  # cached, since thousands of problems share a few sources
    read = load(source, data, split, any_gold=any_gold)
    notes += [*read.notes, *_few(read.malformed)]
    problems = within_pass_rate(read.problems, data.pass_rate, notes) if split == "train" else read.problems
    if source in TASKS:
        return problems
    unusable = unusable_golds(problems, reward)
    if unusable and data.strict:
        raise UserError(f"{'; '.join(_few(list(unusable.values())))}: fix these rows or set data.strict=false")
    notes += _few(list(unusable.values()))
    return [problem for problem in problems if problem.id not in unusable]


def within_pass_rate(problems: list[Problem], bounds: tuple[float, float], notes: list[str]) -> list[Problem]:
    """The problems whose row has a `pass_rate` within `bounds`; a rate of null is outside.

    With the bounds 0 and 1 these are all problems, with or without the column. Otherwise raises UserError for a row
    whose rate is missing or neither a number nor null, and if no problem is left.
    """
    if bounds == (0.0, 1.0):
        return problems
    for problem in problems:
        rate = problem.row.get("pass_rate", "missing")
        if not isinstance(rate, int | float | None):
            found = f"has {rate!r}" if "pass_rate" in problem.row else "is missing"
            raise UserError(
                f"{problem.id}: data.pass_rate needs a number or null in the column pass_rate, which {found}; "
                "`mugrpo rollouts RUN_DIR --by problem --json` writes rows with it"
            )
    rates = [-1.0 if problem.row["pass_rate"] is None else problem.row["pass_rate"] for problem in problems]
    inside = [problem for problem, rate in zip(problems, rates, strict=True) if bounds[0] <= rate <= bounds[1]]
    if not inside:
        raise UserError(
            f"data.pass_rate: none of {len(problems):,} training problems has a rate in {list(bounds)}; widen it"
        )
    notes.append(
        f"{len(problems) - len(inside):,} of {len(problems):,} training problems have a pass rate outside "
        f"{list(bounds)}: left out"
    )
    return inside


def _uncontaminated(train: list[Problem], held_out: list[Problem], drop: bool, notes: list[str]) -> list[Problem]:
    overlaps = contamination(train, held_out)
    if overlaps:
        notes.append(
            f"{len(overlaps)} training problems contain half or more of a held-out problem's wording: "
            + ("left out" if drop else "kept; data.contamination=drop leaves them out")
        )
        notes += _few([f"{c.train.id} contains {c.overlap:.0%} of {c.held_out.id}" for c in overlaps])
    if not drop:
        return train
    contaminated = {entry.train.id for entry in overlaps}
    return [problem for problem in train if problem.id not in contaminated]


def _few(sentences: list[str]) -> list[str]:
    hidden = len(sentences) - MOST_NAMED
    return sentences if hidden <= 0 else [*sentences[:MOST_NAMED], f"and {hidden} more like these"]


def problem_at(seed: int, n_problems: int, position: int) -> int:
    """The index of the problem at `position` of the endless stream of prompts, in which each pass is a new permutation
    of all problems.

    The index depends on nothing but the arguments, so a resumed run needs no state.
    """
    epoch, index = divmod(position, n_problems)
    return int(_permutation(seed, n_problems, epoch)[index])


def update_at(seed: int, stage: int, updates: int, age: int) -> int:
    """The index of the update to take after `age` updates on a stage: in order in the first epoch, permuted in each
    later one."""
    # Updates are permuted as a whole, and groups stay in their updates. So an update is always one row group of the
    # stage's file, and of each file with its log-probabilities under another policy.
    epoch, index = divmod(age, updates)
    return index if epoch == 0 else int(_permutation(seed, updates, stage, epoch)[index])


@lru_cache(maxsize=4)
def _permutation(seed: int, n: int, *stream: int) -> np.ndarray:
    """A permutation of n items, int64 [n], that `seed` and `stream` determine."""
    # Numpy keeps the stream of raw PCG64 draws across versions, but not that of `Generator.permutation` (NEP 19).
    draws = np.random.PCG64(np.random.SeedSequence([seed, *stream])).random_raw(n)
    return np.argsort(draws, kind="stable")
