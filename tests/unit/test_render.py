"""Rendering: texts inserted byte for byte, the same spec the same text, and a struct that agrees with how Python packs it."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import itertools
import random
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import jinja2
import pytest

import flashgen
from flashgen import templates
from flashgen.codegen.block_states import BLOCK_STATES, states_problem, states_spec
from flashgen.codegen.config import Config
from flashgen.codegen.family import families, find_family
from flashgen.codegen.modifier import Modifier, modifier_named, modifiers
from flashgen.codegen.modifiers.traced import TracedModifier, name_of_functions
from flashgen.codegen.operation import operation_of
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.prune import END, MARK, pruned
from flashgen.codegen.render import Atoms, Source, emulator_runtime, jinja_environment, render, render_program, traced
from flashgen.codegen.score_chain import conditions
from flashgen.codegen.score_tensors import fetches
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.traced.modifier import modifier_in_call
from tests.support.examples import examples
from tests.support.plan import every_case
from tests.support.traced_functions import CASES

LAYOUT = {"TensorMap": (128, 64), "i64": (8, 8), "u64": (8, 8), "int": (4, 4), "float": (4, 4)}  # size, alignment


def specs(problems: int) -> list[KernelSpec]:
    """For each family specs of so many problems and more, which differ in every way that its template may look at."""
    found = []
    for family in families().values():
        possible = examples(family)
        for problem, _, target in possible[:: max(1, len(possible) // problems)]:
            legal: list[Config] = family.legal_configs(problem, target)
            step = max(1, len(legal) // 3)
            fp16 = dataclasses.replace(problem, dtype=Dtype.FP16)
            configs = (family.default(problem, target), *legal[::step])
            found += [KernelSpec(family, problem, config, target) for config in configs]
            found.append(KernelSpec(family, fp16, family.default(fp16, target), target))
    return found


def modified_specs() -> list[KernelSpec]:
    """Of each family the first problem with each of its modifiers, and with all of them: once without those that read scores' elements.

    And terms that are linear in the key under a causal mask.
    """
    newest, found = find_target("sm_90a"), list[KernelSpec]()
    for family in (find_family("attention_forward_sm90"), find_family("attention_backward_sm90")):
        linear = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, operation=family.operation, modifiers=("alibi",))
        found.append(KernelSpec(family, linear, family.default(linear, newest), newest))
    for family in families().values():
        problem, _, target = examples(family)[0]
        without = tuple(name for name in family.modifiers if not modifiers()[name].reads_scores)
        every = tuple(name for name in family.modifiers if name not in ("bias_fp32", "document_ids_int64"))
        mapped = tuple(name for name in ("document_ids", "softcap") if name in family.modifiers)  # backward, not all go together with them
        hiding = tuple(name for name in ("document_ids", "prefix_len", "window") if name in family.modifiers)
        ranges = tuple(name for name in without if modifiers()[name].scattered_by is None)  # persistent, the others not beside scores
        alone = ((name,) for name in family.modifiers)
        for kind in dict.fromkeys(kind for kind in (*alone, mapped, hiding, ranges, without, every) if kind):
            modified = dataclasses.replace(problem, modifiers=kind)
            if not family.refusals(modified, target):
                found.append(KernelSpec(family, modified, family.default(modified, target), target))
    return found


def packed_specs() -> list[KernelSpec]:
    """Of each family the first problem with packed sequences, as far as it can: with each modifier, deterministic or not."""
    found = []
    for family in families().values():
        problem, _, target = examples(family)[0]
        if not operation_of(problem).is_attention:
            continue
        for kind, deterministic in itertools.product([(), *((name,) for name in family.modifiers)], (False, True)):
            packed = dataclasses.replace(problem, sequences=Sequences.PACKED, modifiers=kind, deterministic=deterministic)
            if not family.refusals(packed, target):
                found.append(KernelSpec(family, packed, family.default(packed, target), target))
    return list(dict.fromkeys(found))


def cached_specs() -> list[KernelSpec]:
    """Of each family that computes sequences in a cache the first problem with them, with each modifier; those of any batch; of e4m3."""
    found = []
    for family in families().values():
        problem, _, target = examples(family)[0]
        if problem.operation != "forward":
            continue
        for kind in [(), *((name,) for name in family.modifiers)]:
            cached = dataclasses.replace(problem, sequences=Sequences.CACHED, modifiers=kind)
            of_any_batch = [dataclasses.replace(one, batch_invariant=True) for one in (problem, cached) if not kind]
            of_e4m3 = [dataclasses.replace(cached, head_dim=64, head_dim_v=64, dtype_kv=CacheDtype.E4M3)] * (not kind)
            newest = find_target("sm_90a")
            for one, own in (*((one, target) for one in (cached, *of_any_batch)), *((one, newest) for one in of_e4m3)):
                if not family.refusals(one, own):
                    found.append(KernelSpec(family, one, family.default(one, own), own))
    return found


def traced_modifier(name: str) -> TracedModifier:
    """Of a function that is traced in tests."""
    case = CASES[name]
    given = {"mask_mod" if case.is_mask else "score_mod": case.function}
    found = modifier_named(name_of_functions(modifier_in_call(**given).modifier))
    assert isinstance(found, TracedModifier)
    return found


def learning(name: str) -> TracedModifier:
    """The same with gradients of all that may have some."""
    modifier = traced_modifier(name)
    return modifier.learning(modifier.tensors)


def traced_specs() -> list[KernelSpec]:
    """One of each function that is traced in tests, and of some the backward pass."""
    target, found = find_target("sm_80"), []
    problems = [Problem(Dtype.BF16, 64, modifiers=(traced_modifier(name).name,)) for name in CASES]
    problems += [Problem(Dtype.BF16, 64, operation="backward", modifiers=(learning(name).name,)) for name in LEARNING]
    for problem in problems:
        family = find_family(f"attention_{problem.operation}")
        found.append(KernelSpec(family, problem, family.default(problem, target), target))
    family, target = find_family("attention_backward_sm90"), find_target("sm_90a")  # which reads ahead what depends on the distance alone
    problems = [Problem(Dtype.BF16, 64, operation="backward", modifiers=(traced_modifier("relative_bias").name,))]
    problems.append(dataclasses.replace(problems[0], modifiers=(learning("relative_bias").name,), sequences=Sequences.PACKED))
    return [*found, *(KernelSpec(family, problem, family.default(problem, target), target) for problem in problems)]


LEARNING = ("relative_bias", "method")  # of scores that are added to, and of bent ones
STATES = states_spec(states_problem(traced_modifier("mask_method").name), find_target("sm_80"))
SPECS = [*specs(4), STATES]
some_specs = pytest.mark.parametrize("spec", SPECS[::7], ids=lambda s: s.name)
rendered = functools.cache(render)  # of many tests
other_environment = functools.cache(jinja_environment.__wrapped__)
# Kinds of modifiers, the plain kind first; then some of packed sequences, and of those in a cache.
KINDS = ((), *((modifier,) for modifier in (*modifiers().values(), *map(learning, LEARNING))), tuple(modifiers().values()))
PACKED_KINDS = ((), *((modifiers()[name],) for name in ("window", "alibi")))
AT_ONCE = (("tree_mask", "window"), ("bias",), ("alibi", "softcap"))
EVERY_KIND = (
    *((kind, "") for kind in KINDS),
    *itertools.product(PACKED_KINDS, ("forward", "backward")),
    ((), "cached"),
    ((), "invariant"),
    ((), "e4m3"),
    ((modifiers()["bias"],), "ahead"),
    ((modifiers()["alibi"],), "linear"),
    *((tuple(modifiers()[name] for name in names), "at once") for names in AT_ONCE),
)
# Files of tile operations that say something else where a problem has modifiers, or sequences that are not dense.
CONDITIONAL = [path for path in templates.paths() if path.startswith("tile/") and "//%" in templates.read(path)]


def given(kind: Sequence[Modifier], layout: str) -> dict[str, object]:
    """What a file says on behalf of modifiers, in kernels that fetch where registers allow it.

    layout: empty of dense sequences, the pass of packed ones, "cached" of those in a cache, "e4m3" of e4m3 numbers there,
    "invariant" of dense ones in any batch, "ahead" where tensors of scores are loaded ahead, "linear" where terms are a part of the
    exponential, and "at once" in the decode kernels for Hopper
    """
    if layout == "linear":
        return conditions(kind, "forward", linear=True)
    if layout == "ahead":
        return conditions(kind, "forward", early=True)
    if layout == "at once":
        return conditions(kind, "forward", cached=True, early=any(one.fetched for one in kind), at_once=True)
    if layout in ("cached", "e4m3", "invariant"):
        return conditions(kind, "forward", cached=layout != "invariant", e4m3=layout == "e4m3", invariant=layout == "invariant")
    if layout:
        return conditions(kind, layout, packed=True)
    return conditions(kind, "backward", fetches(Problem(Dtype.BF16, 64, modifiers=tuple(one.name for one in kind))))


@pytest.fixture
def step(pytestconfig: pytest.Config) -> int:
    """Every spec with --slow, else every third."""
    return 1 if every_case(pytestconfig) else 3


def every_spec(check: Callable[[KernelSpec], None]) -> Callable[[str, int], None]:
    """Of a check of one spec, a test of each family: as many tests as specs would take longer to collect than to run."""

    @pytest.mark.parametrize("family", dict.fromkeys(spec.family.name for spec in SPECS))
    def test(family: str, step: int) -> None:
        for spec in [one for one in SPECS if one.family.name == family][::step]:
            try:
                check(spec)
            except Exception as error:
                error.add_note(f"of {spec.name}")
                raise

    return test


@pytest.mark.parametrize("path", [p for p in templates.paths() if p.endswith(".cuh") and p not in CONDITIONAL])
def test_a_file_is_inserted_byte_for_byte(path: str) -> None:
    """Inline PTX is full of what Jinja takes for its own: {%0, {{ and {#."""
    text = jinja_environment().from_string("before\n{{ source(path) }}after\n").render(path=path)
    content = (templates.ROOT / path).read_bytes()
    named, inserted = text.removeprefix("before\n").split("\n\n", 1)
    assert named.startswith(f"// ==== {path} ==")
    assert inserted.encode() == content + END.encode() + b"after\n"


@pytest.mark.parametrize("path", templates.paths())
def test_no_line_is_longer_than_140_columns(path: str) -> None:
    assert [line for line in templates.read(path).splitlines() if len(line) > 140] == []


LONGEST = {"kernels/attention_forward": 160, "kernels/": 220, "tile/": 200, "atoms/": 200}  # lines; the first that fits counts
FOR_MODIFIERS = 10  # lines more, of problems that have some


@pytest.mark.parametrize("path", [path for path in templates.paths() if path.startswith(tuple(LONGEST))])
def test_a_file_is_short_enough_to_be_read_at_once(path: str) -> None:
    most = next(lines for start, lines in LONGEST.items() if path.startswith(start))
    if path in CONDITIONAL:
        template = jinja_environment().from_string("{{ source(path) }}")
        plain, *others = (template.render(path=path, **given(*kind)).split("\n\n", 1)[1].count("\n") for kind in EVERY_KIND)
        assert plain <= most
        assert max(others) <= most + FOR_MODIFIERS
    else:
        assert len([line for line in templates.read(path).splitlines() if not line.startswith("//%")]) <= most


@some_specs
def test_nothing_is_there_that_nothing_uses(spec: KernelSpec) -> None:
    code = re.sub(r"//[^\n]*", "", rendered(spec).text)
    functions = re.findall(r"(?m)^__device__ __forceinline__ [^(=\n]*?[ &*](\w+)(?:<[^(\n]*>)?\(", code)
    structs = re.findall(r"(?m)^struct (?:alignas\(\d+\) )?(\w+)", code)
    words = collections.Counter(re.findall(r"\w+", code))
    assert functions or not spec.family.atoms
    assert [name for name in (*functions, *structs) if words[name] == 1] == []


def test_what_nothing_uses_is_left_out() -> None:
    text = (
        "// header\n// ==== tile/one.cuh ====\n\n// What one is for.\n\n// Used.\ntemplate <int kN>\nstruct Used {\n    int a;\n};\n\n"
        "// Unused, though it uses.\n__device__ int unused(Used<1> x) {\n    return helper(x.a);\n}\nconstexpr int kFirst = 1;\n\n\0"
        "// ==== tile/two.cuh ====\n\n// What two is for.\n\n__device__ int helper(int x) { return x; }\n"
        "// ==== emulator/three.cuh ====\nnamespace emulator {\nstruct Kept {};\n}\n"
        "\0int x = kFirst + sizeof(Used<2>);\n"
    )
    left = pruned(text)
    assert [word in left for word in ("What one is for", "struct Used", "kFirst = 1", "Kept", "// header")] == [True] * 5
    assert [word in left for word in ("unused", "Unused", "two", "helper")] == [False] * 4


@every_spec
def test_the_header_lists_the_parts_in_their_order(spec: KernelSpec) -> None:
    header, text = rendered(spec).text.split("\n\n", 1)
    words = " ".join(line.removeprefix("//").strip() for line in header.split("//   parts    ")[1].splitlines())
    listed = {
        f"{folder}/{name}.cuh" for folder, names in re.findall(r"(\S+): ((?:\w+(?:, |(?= |$)))+)", words) for name in names.split(", ")
    }
    assert listed == set(re.findall(r"^// ==== (\S+) =+$", text, re.MULTILINE))


@pytest.mark.parametrize("path", CONDITIONAL)
def test_a_file_with_conditions_has_either_what_holds_for_plain_problems_or_the_rest(path: str) -> None:
    template = jinja_environment().from_string("{{ source(path) }}")
    lines, texts = templates.read(path).splitlines(), set()
    for kind in EVERY_KIND:
        said = given(*kind)
        texts.add(text := template.render(path=path, **said).split("\n\n", 1)[1])
        assert "//%" not in text
        from_functions = (str(said[name]) for name in ("traced", "traced_slope", "traced_gradients", "traced_tiles", "traced_distances"))
        inserted = "\n".join(from_functions).splitlines()  # what comes of functions is no line of a file
        assert all(line in lines or line in inserted for line in text.removesuffix(END).splitlines())
    assert len(texts) > 1


@pytest.mark.parametrize(
    "content", ['asm("{%0, %1};" : : "r"({{0}}));\n', "{# no comment #}\n//% if\n  {% raw %}\n", "<&> no newline at the end"]
)
def test_not_even_jinja_in_a_file_is_read_as_jinja(content: str) -> None:
    text = "//% for i in range(1)\n{{ source('x') }}|\n//% endfor\n"
    assert jinja_environment().from_string(text, globals={"source": lambda path: content}).render() == content + "|\n"


def lines_of_parts(text: str) -> dict[str, list[str]]:
    """Of each part of a text its lines, without blank ones: those of the last part of atoms and tiles go on to the template's own."""
    text = re.sub(rf"(?ms)^// ---- the kernel.*?(?=^{MARK}|\Z)", "", text)
    sections = re.split(rf"(?m)^(?={MARK})", text)[1:]
    parts = {section.split(" ")[2]: section.splitlines()[1:] for section in sections}
    assert len(parts) == len(sections)
    return {path: [line for line in lines if line] for path, lines in parts.items()}


@some_specs
def test_parts_are_lines_of_their_files_and_tiles_the_same_for_both_atoms(spec: KernelSpec) -> None:
    found = [lines_of_parts(rendered(spec, atoms).text) for atoms in Atoms]
    for path, lines in found[0].items():
        every = templates.read(path).splitlines()
        known, file = set(every), iter(every)
        own = list(itertools.takewhile(known.__contains__, lines))
        assert own, path
        assert all(line in file for line in own), f"{path}: not in order"
        if path.startswith("tile/"):
            assert own == list(itertools.takewhile(known.__contains__, found[1][path]))


@pytest.mark.slow
def test_every_line_of_every_file_is_used_by_a_kernel() -> None:
    apart = "atoms/ptx/mbarrier_cluster.cuh"  # kernels use the cheaper half; the other half is probed beside it
    files = [path for path in templates.paths() if path.endswith(".cuh") and path != apart]
    unused = {
        path: dict.fromkeys(line for line in templates.read(path).splitlines() if line and not line.startswith(("//%", "<%=")))
        for path in files
    }
    found = specs(8) + modified_specs() + packed_specs() + cached_specs() + traced_specs() + [STATES]
    random.Random(1).shuffle(found)  # soon all lines have been seen, and the other texts need not be rendered
    found.sort(key=lambda spec: not spec.problem.modifiers)  # of which there are few
    apart_from_kernels = [emulator_runtime().text, render_program(SPECS[0]).text, traced(rendered(SPECS[0], Atoms.EMULATED)).text]
    for text in itertools.chain(apart_from_kernels, (rendered(s, atoms).text for s in found for atoms in Atoms)):
        for path, lines in lines_of_parts(text).items():
            for line in lines if path in unused else ():
                unused[path].pop(line, None)
            if not unused.get(path, True):
                del unused[path]
        if not unused:
            break
    assert {path: list(lines) for path, lines in unused.items()} == {}
    of_families = sorted([*(f.template for f in families().values()), BLOCK_STATES.template])
    assert of_families == [p for p in templates.paths() if p.endswith(".cu.j2")]
    for path in (p for p in templates.paths() if p.endswith(".j2") and p not in of_families):
        assert any(f'include "{path}"' in templates.read(template) for template in of_families), path


@every_spec
def test_a_text_has_the_clusters_that_its_blocks_have(spec: KernelSpec) -> None:
    text, kernels = rendered(spec).text, {}
    for suffix in spec.kernels:
        (said,) = re.findall(rf"__launch_bounds__\(\w+, \w+\)(.*)\s+{spec.name}{suffix}\(", text)
        kernels[suffix] = said.strip()
    sizes = {suffix: block.cluster for suffix, block in spec.resources.items()}
    assert kernels == {suffix: f"__cluster_dims__({size}, 1, 1)" if size > 1 else "" for suffix, size in sizes.items()}


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'block_k' is undefined"):
        jinja_environment().from_string("{{ block_k }}").render(block_q=1)
    with pytest.raises(jinja2.UndefinedError):
        jinja_environment().from_string("{{ 'x' if spec.nonsense }}").render(spec=SPECS[0])


@pytest.mark.parametrize("path", ["atoms/ptx/nonsense.cuh", "../codegen/render.py", "/etc/hostname", "atoms"])
def test_only_files_of_templates_are_read(path: str) -> None:
    with pytest.raises(FileNotFoundError, match="no template text"):
        templates.read(path)


@every_spec
def test_the_same_spec_gives_the_same_text(spec: KernelSpec) -> None:
    """Whatever was rendered before, and in an environment of its own."""
    first = rendered(spec)
    with mock.patch("flashgen.codegen.render.jinja_environment", other_environment):
        second = render(spec if spec is STATES else KernelSpec.from_json(spec.to_json()))  # nobody finds its family by name
    assert first == second
    assert first.digest == second.digest


def test_different_specs_give_different_texts(step: int) -> None:
    some = SPECS[::step]
    assert len({s.name for s in some}) == len({rendered(s).digest for s in some})


@every_spec
def test_the_text_stands_alone_and_tells_what_it_is(spec: KernelSpec) -> None:
    source = rendered(spec)
    head, _, body = source.text.partition("\n\n")
    lines = head.splitlines()
    assert all(line.startswith("//") for line in lines)
    assert lines[0] == f"// {spec.name}"
    words = " ".join(word for line in lines for word in line.removeprefix("//").split())
    for fact in (spec.problem.name, spec.target.name, *(f"{k} {v}".lower() for k, v in spec.config.to_json().items())):
        assert fact in words
    assert source.entry == spec.name
    assert len(re.findall(rf'^extern "C" __global__ void [^;{{]*\b{spec.name}\(', body, re.MULTILINE)) == 1
    assert "#include" not in source.text


@every_spec
def test_the_text_says_nothing_of_where_and_when_it_was_made(spec: KernelSpec) -> None:
    text = rendered(spec).text
    assert flashgen.__version__ not in text
    assert not re.search(r"\b20\d\d-\d\d|\d\d:\d\d", text), "no time"
    assert str(datetime.date.today().year) not in text
    assert not re.search(r"(?<!/)/(home|tmp|usr|opt|root)/|templates/", text), "no path"
    assert str(Path(flashgen.__file__).parent.parent) not in text


@every_spec
def test_the_text_reads_as_if_written_by_hand(spec: KernelSpec) -> None:
    text = rendered(spec).text
    assert "//%" not in text, "a line of Jinja was left"
    assert not re.search(r"[ \t]+$", text, re.MULTILINE), "trailing space"
    assert "\n\n\n" not in text, "two blank lines"
    assert "\t" not in text
    assert text.endswith("}\n")


@every_spec
def test_the_struct_is_the_parameter_block(spec: KernelSpec) -> None:
    (body,) = re.findall(r"^struct Parameters \{\n(.*?)^\};", rendered(spec).text, re.MULTILINE | re.DOTALL)
    fields = re.findall(r"^ +(.*?)([A-Za-z_]\w*);(?:  // .*)?$", body, re.MULTILINE)
    signature = ", ".join(f"{kind.strip()} {name}" for kind, name in fields)
    assert len(fields) == len(body.splitlines())
    assert signature == spec.kernels[""].parameters.signature


def c_offsets(block: ParameterBlock) -> tuple[list[int], int]:
    """Where C puts the fields, each at the next multiple of its alignment, and the struct's size, a multiple of the largest."""
    offsets, end, largest = [], 0, 1
    for field in block.fields:
        size, alignment = (8, 8) if field.c_type.endswith("*") else LAYOUT[field.c_type]
        end = -(-end // alignment) * alignment
        offsets.append(end)
        end, largest = end + size, max(largest, alignment)
    return offsets, -(-end // largest) * largest


MAPS = ParameterBlock(
    (
        *(Parameter("TensorMap", f"{name}_map") for name in ("v", "q", "k")),
        *(Parameter(kind, name) for kind, name in (("Element*", "out"), ("int*", "tile_counter"), ("float*", "lse"))),
        *(Parameter(kind, name) for kind, name in (("u64", "reciprocal"), ("int", "len_q"), ("float", "scale_log2"), ("int", "len_kv"))),
    )
)
BLOCKS = {**{family.name: family.parameters for family in families().values()}, "tensor maps": MAPS}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_host_packs_as_c_lays_out(block: ParameterBlock) -> None:
    offsets, size = c_offsets(block)
    values = {field.name: 1000 + i for i, field in enumerate(block.values)}
    packed = block.pack(dict(reversed(values.items())))
    assert len(packed) == size
    assert size % block.alignment == 0
    first = len(block.fields) - len(block.values)
    assert not any(packed[: offsets[first]]), "pointers are null and maps empty until the launch"
    for field, offset, value in zip(block.values, offsets[first:], values.values(), strict=True):
        kind = {"i64": "<q", "u64": "<Q", "int": "<i", "float": "<f"}[field.c_type]
        assert struct.unpack_from(kind, packed, offset) == (value,), field.name


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_addresses_go_where_c_has_the_fields_of_their_names(block: ParameterBlock) -> None:
    offsets = dict(zip([field.name for field in block.fields], c_offsets(block)[0], strict=True))
    found = {place.name: place.offset for place in block.pointers}
    found.update({f"{place.name}_map": place.offset for place in block.tensor_maps})
    assert found == {name: offset for name, offset in offsets.items() if name not in [field.name for field in block.values]}


def test_a_block_pads_its_end_only() -> None:
    block = ParameterBlock((Parameter("float*", "lse"), Parameter("i64", "n"), Parameter("int", "m")))
    assert block.signature == "float* lse, i64 n, int m"
    assert block.pack({"m": 7, "n": -1}) == struct.pack("<QqiI", 0, -1, 7, 0)
    assert c_offsets(block) == ([0, 8, 16], 24)


def test_a_block_with_a_tensor_map_is_a_multiple_of_its_alignment() -> None:
    block = ParameterBlock((Parameter("TensorMap", "k_map"), Parameter("int", "n")))
    assert block.pack({"n": 7}) == struct.pack("<128si60x", b"", 7)
    assert c_offsets(block) == ([0, 128], 192)


@pytest.mark.parametrize("kinds", ["int i64", "i64 float*", "int float*", "float* TensorMap", "i64 TensorMap"])
def test_a_block_that_c_would_pad_inside_is_refused(kinds: str) -> None:
    names = {"float*": "lse", "TensorMap": "q_map"}
    with pytest.raises(ValueError, match="must be ordered"):
        ParameterBlock(tuple(Parameter(kind, names.get(kind, "n")) for kind in kinds.split()))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (Parameter("TensorMap", "q"), r"^a TensorMap must be named after its tensor, like q_map; got 'q'$"),
    ],
)
def test_a_field_that_no_launch_could_fill_is_refused(field: Parameter, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterBlock((field,))


def test_a_value_out_of_range_is_no_silent_wrap() -> None:
    block = ParameterBlock((Parameter("int", "n"),))
    with pytest.raises(struct.error):
        block.pack({"n": 2**31})


@pytest.mark.parametrize("values", [{}, {"n": 1}, {"n": 1, "m": 2, "o": 3}, {"n": 1, "o": 2}])
def test_values_are_of_the_fields_and_no_others(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^values must be of n, m; got"):
        ParameterBlock((Parameter("int", "n"), Parameter("int", "m"))).pack(values)


def test_the_digest_is_of_the_text() -> None:
    assert Source("k", "a").digest == Source("other", "a").digest != Source("k", "b").digest


def test_a_parameter_of_a_type_that_nobody_packs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a parameter's type must be a pointer or one of TensorMap, i64, u64, int, float; got 'double'$"):
        Parameter("double", "scale")
