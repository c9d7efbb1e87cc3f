"""Programs are the baseline with parts put in: readable, named by what they are, distinct in source."""

from __future__ import annotations

import ast
import builtins
import difflib
import itertools

import pytest

from engine.artifacts import baseline_files, source_hash
from optimizer.agents import KINDS
from optimizer.agents.programs import edit
from optimizer.agents.programs.edit import EditError, parse, parts, put_in, without
from optimizer.agents.programs.program import Program, ProgramError

ALL = list(parts())
BASELINES = ("llama", "grouped", "latent")
LLAMA = baseline_files("llama")["forward.py"]
FITS = [(name, baseline) for baseline in BASELINES for name, part in parts().items() if baseline in part.baselines]
OF_LLAMA = [name for name, baseline in FITS if baseline == "llama"]


def undefined(text: str) -> set[str]:
    """Names that a module loads and nothing in it, nor the language, defines."""
    tree = ast.parse(text)
    loaded, stored = set(), set(dir(builtins)) | {"__name__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return loaded - stored


@pytest.mark.parametrize(("name", "baseline"), FITS)
def test_every_part_fits_its_baselines_as_they_are_today(name: str, baseline: str) -> None:
    files, plain = Program.of([name]).files(baseline), baseline_files(baseline)
    changed = [file for file, text in files.items() if file.endswith(".py") and text != plain.get(file)]
    assert "forward.py" in changed and len(changed) > (baseline != "llama")
    assert not any(undefined(text) for file, text in files.items() if file.endswith(".py"))
    assert parts()[name].title in " ".join(files["forward.py"].split())


@pytest.mark.parametrize("baseline", BASELINES)
def test_all_pairs_that_claim_to_fit_do_fit(baseline: str) -> None:
    names = [name for name, fits in FITS if fits == baseline]
    together = [pair for pair in itertools.combinations(names, 2) if Program.of([pair[0]]).fits(pair[1])]
    whole = [pair for pair in together if all(baseline in part.baselines for part in Program.of(pair).chosen)]
    assert len(whole) > {"llama": 50, "grouped": 50, "latent": 5}[baseline]
    for pair in whole:
        files = Program.of(pair).files(baseline)
        assert not any(undefined(text) for file, text in files.items() if file.endswith(".py")), pair


def test_methods_that_a_part_leaves_unused_are_dropped() -> None:
    text = Program.of(["paged_attention"]).files()["forward.py"]
    assert "class Plan" not in text and "prefill_attention" not in text
    assert "class Plan" in LLAMA


def test_a_small_idea_is_a_small_diff() -> None:
    diff = difflib.unified_diff(LLAMA.splitlines(), Program.of(["rms_norm"]).files()["forward.py"].splitlines(), n=0)
    changed = [line for line in diff if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= 10


def test_a_name_says_the_whole_program() -> None:
    programs = [Program(), *(Program.of([name]) for name in ALL)]
    programs += [Program.of(["whole_step"], PM_SPIN=200, policy="prefill_first"), Program.of([], block_size=64)]
    assert [Program.parse(p.name) for p in programs] == programs
    assert programs[-2].settings == {"policy": "prefill_first"} and programs[-2].parameters == {"PM_SPIN": 200}


def test_parameters_change_a_program_but_not_its_mechanism() -> None:
    plain, tuned = Program.of(["whole_step"]), Program.of(["whole_step"], PM_SPIN=200)
    assert plain.files() != tuned.files()
    assert source_hash(plain.files()) == source_hash(tuned.files())


def test_all_ideas_are_distinct_in_source() -> None:
    for baseline, least in (("llama", 15), ("grouped", 10)):
        ideas = {
            Program.of(idea)
            for kind in KINDS
            for idea in kind.ideas
            if all(baseline in part.baselines for part in Program.of(idea).chosen)
        }
        assert len({source_hash(p.files(baseline), p.settings) for p in ideas}) == len(ideas) >= least


def test_parts_that_rewrite_the_same_region_are_refused() -> None:
    with pytest.raises(ProgramError, match="both rewrite linear"):
        Program.of(["packed_linear", "small_linear"])
    with pytest.raises(ProgramError, match="no part 'nothing'"):
        Program.of(["nothing"])


def test_what_a_part_needs_comes_with_it() -> None:
    assert Program.of(["postops"]).parts == ("packed_linear", "postops")


def test_a_part_for_another_text_is_refused_by_name() -> None:
    part = parse("stale", "title: t\nfocus: cache\nslots: x\nwhy: w\n<<<<\nno such line\n====\nnew\n>>>>\n")
    with pytest.raises(EditError, match="stale looks for this text once and finds it 0 times"):
        put_in({"forward.py": LLAMA}, [part])
    with pytest.raises(EditError, match="lacks focus, slots, why"):
        parse("bare", "title: t\n<<<<\na\n====\nb\n>>>>\n")
    with pytest.raises(EditError, match="no Nothing to drop"):
        without({"forward.py": LLAMA}, {"Nothing", "Missing?"})


def test_a_hunk_that_two_parts_share_is_put_in_once() -> None:
    text = Program.of(["fused_qkv", "fused_gate_up"]).files()["forward.py"]
    assert text.count("def stack(") == 1 and text.count("stack(model, self.weights") == 2


def test_every_part_file_is_in_the_catalogue() -> None:
    assert {p.stem for p in edit.FOLDER.iterdir()} == set(ALL)
