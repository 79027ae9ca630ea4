"""Questions that the target invents, and near duplicates among them."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.corpus.accounting import Accounting
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.chat import stop_ids, user_turn
from pipeline.corpus.duplicates import DuplicateFilter
from pipeline.corpus.hash_table import HashMultiMap, HashSet
from pipeline.corpus.progress import CorpusProgress
from pipeline.corpus.prompts import Admission, Prompt
from pipeline.corpus.questions import QuestionMaker, whole_sentences
from pipeline.corpus_schema import CorpusConfig
from tests.unit.pipeline.corpus_samples import tiny_model, tiny_tokenizer
from tests.unit.pipeline.corpus_sources import texts, with_template

LLAMA2_LIKE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


def test_user_turn_is_cut_out_of_any_template() -> None:
    model = tiny_model()
    turn = user_turn(tiny_tokenizer(), model, "Be brief")
    assert turn.prefix == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n"
    assert turn.suffix == "<|im_end|>\n" and turn.stop_token_ids == {2}
    plain = user_turn(with_template(LLAMA2_LIKE), model, None)
    assert (plain.prefix, plain.suffix) == ("[INST] ", " [/INST]") and plain.stop_token_ids == {2}
    with pytest.raises(ValueError, match="where the user's words go"):
        user_turn(with_template("{{ 'fixed text' }}"), model, None)
    with pytest.raises(ValueError, match="refuses"):
        user_turn(with_template("{{ raise_exception('no') }}"), model, None)


def test_a_template_that_drops_system_prompts_is_not_asked_under_them() -> None:
    """Each topic would be the label of a question that never saw it."""
    drops = with_template(LLAMA2_LIKE)
    with pytest.raises(ValueError, match=r"corpus.system_prompts: .* leaves system prompts out"):
        user_turn(drops, tiny_model(), "You teach history")
    trims = with_template("{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}")
    assert user_turn(trims, tiny_model(), " You teach\nhistory ").prefix == "<|im_start|>You teach\nhistory<|im_end|><|im_start|>"


def test_a_turn_may_end_with_another_token_than_the_text() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>{% endfor %}"
    assert user_turn(with_template(template), tiny_model(), None).stop_token_ids == {0, 2}
    assert stop_ids(tiny_model(), tiny_tokenizer()) == {2}


@pytest.mark.parametrize(("named", "kept"), [([2, 320, 5], {2, 5}), (-1, set()), (7, {7})])
def test_ids_that_the_target_cannot_put_out_end_nothing(named: object, kept: set[int]) -> None:
    """Configs that name ids of a larger tokenizer, or -1 for none: an engine refuses a request that stops at them."""
    settings = SimpleNamespace(eos_token_id=named)
    target = SimpleNamespace(config=tiny_model().config, generation_config=settings)
    assert stop_ids(target, tiny_tokenizer()) == kept


def make_maker(corpus: CorpusConfig) -> QuestionMaker:
    backend = NativeCorpusBackend(tiny_model(), batch_size=8, max_length=256)
    return QuestionMaker(corpus, tiny_tokenizer(), tiny_model(), backend)


def make_questions(tmp_path: Path, **settings: object) -> tuple[list[Prompt], Accounting]:
    corpus = CorpusConfig(**{"num_prompts": 12, "batch_size": 8, **settings})  # type: ignore[arg-type]
    accounting = Accounting()
    made = make_maker(corpus).prompts(
        tmp_path / "questions",
        accounting,
        CorpusProgress(),
        num_wanted=corpus.num_prompts or 0,
        admission=Admission(corpus.max_prompt_tokens),
    )
    return list(made), accounting


def test_questions_come_from_the_template_and_are_accounted_for(tmp_path: Path) -> None:
    prompts, accounting = make_questions(tmp_path, question_starters=["What", "Why"])
    assert len(prompts) == 12 == len({prompt.prompt_id for prompt in prompts})
    for text in texts(prompts):
        assert text.startswith(("<|im_start|>user\nWhat", "<|im_start|>user\nWhy"))
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert accounting.num_requested == 12 + accounting.skipped.total()
    assert accounting.skipped["question_cut"] > 0, "noise without a sentence in it"


def test_questions_are_the_same_again_and_differ_by_seed(tmp_path: Path) -> None:
    first = make_questions(tmp_path / "a")[0]
    assert first == make_questions(tmp_path / "b")[0]
    assert first == make_questions(tmp_path / "a")[0], "read back from finished rounds"
    assert first != make_questions(tmp_path / "c", seed=1)[0]


def test_topics_fill_the_system_prompts() -> None:
    with pytest.raises(ValueError, match="go together"):
        CorpusConfig(topics=["cooking"])
    with pytest.raises(ValueError, match="go together"):
        CorpusConfig(system_prompts=["About {topic}"])
    maker = make_maker(CorpusConfig(system_prompts=["Ask about {topic}."], topics=["tea", "sea"]))
    prefixes = {maker._slot(number).turn.prefix for number in range(20)}
    assert {maker.domain_of(number) for number in range(20)} == {"tea", "sea"}
    assert prefixes == {
        f"<|im_start|>system\nAsk about {topic}.<|im_end|>\n<|im_start|>user\n" for topic in ("tea", "sea")
    }


def test_no_usable_question_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_question_tokens=49: must be at most max_question_tokens=48"):
        CorpusConfig(min_question_tokens=49)
    with pytest.raises(ValueError, match="no usable question in 16 tries"):
        make_questions(tmp_path, num_prompts=4, min_question_tokens=48)


def test_questions_that_nobody_asks_for_are_surplus(tmp_path: Path) -> None:
    """A mixture that ends early closes the iterator; every sampled question stays accounted for."""
    accounting = Accounting()
    made = make_maker(CorpusConfig(num_prompts=12, batch_size=8)).prompts(
        tmp_path / "questions", accounting, CorpusProgress(), num_wanted=12, admission=Admission(256)
    )
    taken = [next(made), next(made)]
    made.close()  # type: ignore[attr-defined]
    assert accounting.num_requested == len(taken) + accounting.skipped.total() and accounting.skipped["surplus"] > 0


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        ("What is a cat? I would like to", "What is a cat?"),
        ('He said "go." And then', 'He said "go."'),
        ("Return `None`.", "Return `None`."),
        ("Compose a sonnet.\n1. roses\n2.", "Compose a sonnet."),
        ("Which costs 3.50 or", ""),
        ("Write to J. Smith about", ""),
        ("Sort this. ```\nx = a. b", "Sort this."),
        ("これは何ですか？次に", "これは何ですか？"),
        ("no end", ""),
    ],
)
def test_a_cut_question_ends_with_its_last_whole_sentence(cut: str, whole: str) -> None:
    assert whole_sentences(cut) == whole


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("What is the capital of France?", "duplicate"),
        ("what is  the capital, of france", "duplicate"),
        ("What is the capital of France today?", "near_duplicate"),
        ("What is the capital of Peru?", None),
        ("Write a poem.", None),
    ],
)
def test_duplicates(second: str, expected: str | None) -> None:
    duplicates = DuplicateFilter()
    assert duplicates.reason("What is the capital of France?") is None
    assert duplicates.reason(second) == expected


def jaccard(first: str, second: str) -> float:
    one, two = ({tuple(words[i : i + 3]) for i in range(len(words) - 2)} for words in (first.split(), second.split()))
    return len(one & two) / len(one | two)


def test_near_duplicates_are_those_of_a_brute_force_search() -> None:
    """No false one, and of the true ones as many as the banding promises: .99 at the threshold, more above it."""
    drawn = random.Random(0)
    words = [f"w{i}" for i in range(300)]
    kept: list[str] = []
    filtered = DuplicateFilter(0.7)
    num_near = num_missed = 0
    for _ in range(600):
        if kept and drawn.random() < 0.5:
            changed = drawn.choice(kept).split()
            for _ in range(drawn.randint(1, 3)):
                changed[drawn.randrange(len(changed))] = drawn.choice(words)
            text = " ".join(changed)
        else:
            text = " ".join(drawn.choices(words, k=drawn.randint(12, 40)))
        is_near = any(jaccard(text, other) >= 0.7 for other in kept)
        found = filtered.reason(text) is not None
        assert not (found and not is_near), text
        num_near += is_near
        num_missed += is_near and not found
        if not found:
            kept.append(text)
    assert num_near > 50 and num_missed <= 2


def test_only_equal_words_are_duplicates_at_jaccard_one() -> None:
    filtered = DuplicateFilter(1.0)
    assert [filtered.reason(text) for text in ("a b c d e f g h", "a b c d e f g h i", "A, b c d e f g h")] == [
        None, None, "duplicate",
    ]  # fmt: skip


def test_hash_tables_agree_with_pythons() -> None:
    drawn = random.Random(1)
    keys = [drawn.choice([0, 1, 2**64 - 1, drawn.getrandbits(64), drawn.getrandbits(4)]) for _ in range(5000)]
    table, known, many, lists = HashSet(), set[int](), HashMultiMap(), dict[int, list[int]]()
    for number, key in enumerate(keys):
        key = key or 1  # 0 and 1 are one key
        assert table.add(key) == (key not in known)
        known.add(key)
        many.add(key, number)
        lists.setdefault(key, []).append(number)
    assert len(table) == len(known)
    assert all(sorted(many.get(key)) == numbers for key, numbers in lists.items())
    assert list(many.get(123456789)) == [] and table.add(123456789)
