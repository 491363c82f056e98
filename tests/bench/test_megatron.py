"""Megatron-LM's cases as commands, and some of them estimated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.megatron import cases, environment, runner, sentences, table

GOLDENS = {golden.name: golden for golden in cases.goldens()}
ESTIMATED = (
    "gpt/gpt3_mcore_te_tp2_pp2_cp2_nondeterministic@a100",
    "t5/t5_mcore_te_tp1_pp1_vp1_resume_torch@h100",
)
"""All kinds of parallelism on mock data, and sentences in place of them. The benchmark has all."""
pytestmark = pytest.mark.skipif(not GOLDENS, reason="the measured data are not here")


def test_every_case_is_a_command_or_says_why_not() -> None:
    apart = {golden.name: cases.counted_apart(golden) for golden in GOLDENS.values()}
    assert sum(not reason for reason in apart.values()) > 130
    for golden in GOLDENS.values():
        if apart[golden.name].startswith("its script"):
            continue
        words = cases.command(golden.case, Path("/source"), Path("/work"))
        assert words[:3] == ["torchrun", "--nproc-per-node", str(cases.world_size(golden.case))]
        assert (cases.SOURCE / Path(words[3]).relative_to("/source")).is_file()
        assert not any("${" in word for word in words)
        if cases.sentences_by(golden.case) is None:
            assert words[-2] == "--vocab-size"
            assert "--data-path" not in words
        else:
            assert "--vocab-file" in words
            assert words[words.index("--data-path") + 1] == str(
                sentences.data_path(cases.SENTENCES)
            )


def test_lists_are_several_words() -> None:
    words = cases.command(
        "hybrid/hybrid_mr_mcore_te_tp1_pp2_vpp2_cp1_dgx_a100_1N8G", Path("/source"), Path("/work")
    )
    at = words.index("--spec")
    assert words[at + 2] == "hybrid_stack_spec"
    assert words[at + 3].startswith("--")


def test_a_value_with_spaces_is_one_word_unless_it_is_numbers() -> None:
    words = cases.command("gpt/gpt3_15b_8t_release", Path("/source"), Path("/work"))
    assert words[words.index("--step-batch-size-schedule") + 1] == "0:384 200B:768 400B:1152"
    words = cases.command(
        "gpt/gpt3_mcore_te_tp1_pp2_cp4_a2a_p2p_nondeterministic", Path("/source"), Path("/work")
    )
    at = words.index("--hierarchical-context-parallel-sizes")
    assert words[at + 1 : at + 3] == ["2", "2"]


def test_a_case_runs_on_as_many_gpus_and_with_what_it_says() -> None:
    assert cases.world_size("gpt/gpt3_mcore_reruns_resume_check_grads") == 1
    assert cases.world_size("gpt/gpt3_mcore_te_tp1_pp4_vp1") == 8
    assert cases.installed("gpt/gpt3_mcore_te_tp1_pp4_vp1") == cases.PACKAGES
    assert cases.installed("gpt/gpt3_mcore_tp2_pp2_uninstall_te") == ("flash_attn",)


def test_byte_pairs_are_as_transformers_reads_them(tmp_path: Path) -> None:
    sentences.write_tokenizer(tmp_path, sentences.BPE)
    place = sentences.vocabulary(tmp_path, sentences.BPE).parent
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(place)
    assert len(tokenizer) == 50_257
    numbers = tokenizer("some words, and più")["input_ids"]
    assert len(numbers) < len("some words, and più")
    assert tokenizer.decode(numbers) == "some words, and più"


def test_sentences_are_as_megatron_reads_them(tmp_path: Path) -> None:
    sentences.write_data(tmp_path)
    index = sentences.data_path(tmp_path).with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    count, documents = np.frombuffer(index, np.int64, 2, 18).tolist()
    lengths = np.frombuffer(index, np.int32, count, 34)
    starts = np.frombuffer(index, np.int64, count, 34 + 4 * count)
    ends = np.frombuffer(index, np.int64, documents, 34 + 12 * count)
    words = np.fromfile(sentences.data_path(tmp_path).with_suffix(".bin"), np.int32)
    assert starts[-1] + 4 * lengths[-1] == words.nbytes
    assert ends[-1] == count
    assert len(index) == 34 + 12 * count + 8 * documents


def test_an_answer_is_held_against_the_measured_peak() -> None:
    golden = cases.Golden("a/b", "h100", 1000, 800)
    sizes = {"peak_bytes": 5, "low_bytes": 4, "high_bytes": 6}
    allocated = {"allocated_peak_bytes": 1004, "allocated_low_bytes": 1001}
    found = runner.compared(golden, {**sizes, **allocated, "allocated_high_bytes": 1010})
    assert (found["error"], found["near"], found["inside"]) == (0.004, True, False)
    assert found["error_after_step_2"] == 0.255


def test_cases_apart_do_not_count() -> None:
    answered = {"apart": "", "answered": True, "error": -0.01, "near": False, "inside": True}
    answered["host_bytes"] = 7
    failed = {"apart": "", "answered": False, "complaint": "no"}
    sums = table.summary({"a": answered, "b": failed, "c": {**failed, "apart": "fp8"}}, 9)
    assert (sums["run"], sums["answered"], sums["apart"], sums["near"]) == (2, 1, 1, 0)
    assert (sums["answered_fraction"], sums["largest_error"]) == (0.5, 0.01)


@pytest.mark.skipif(not environment.complete(), reason="a package is not here")
@pytest.mark.parametrize("name", ESTIMATED)
def test_a_case_is_near(name: str) -> None:
    result = runner.run(GOLDENS[name], environment.prepare(fetch=False))
    assert result["answered"], result
    assert result["near"], result
    assert result["inside"], result
