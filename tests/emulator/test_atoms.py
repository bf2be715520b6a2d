"""Each atom in the emulator: against a model of what the PTX ISA says, and (marked gpu) bit for bit against the GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from flashgen import templates
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder
from flashgen.build.gpu.driver import gpu
from flashgen.build.nvrtc import compile_source
from tests.support import cluster_probes, hopper_backward_probes, hopper_probes
from tests.support.probes import ATOM_FILES, Probe, Words, compile_at_once

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    65504.0,
    65519.9,
    65520.0,
    1e38,
    -1e38,
    np.inf,
    -np.inf,
    6e-8,
    3e-8,
    2.9802322e-8,
    1e-40,
    -1e-45,
    6.1e-5,
    3.4e38,
]


def floats(count: int = 4096, low: float = -40.0, high: float = 20.0) -> np.ndarray:
    """fp32 values of both signs, their logarithms spread evenly, halves between 16-bit elements among them, and the special ones."""
    rng = np.random.default_rng(1)
    values: np.ndarray = (np.exp2(rng.uniform(low, high, count)) * rng.choice([-1, 1], count)).astype(np.float32)
    values[::4] = (values[::4].view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)  # halfway between two bf16
    values[1::4] = (values[1::4].view(np.uint32) & 0xFFFFE000 | 0x1000).view(np.float32)  # and between two fp16
    values[: len(SPECIAL)] = SPECIAL
    return values


def around_e4m3() -> np.ndarray:
    """`floats`, of which every other one is near e4m3 numbers: these, halves between them, and numbers next to the halves."""
    values = floats()
    elements = torch.arange(126).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    halves = (elements[1:] + elements[:-1]) / 2
    near = np.concatenate([elements, halves, np.nextafter(halves, np.float32(1e9)), np.nextafter(halves, np.float32(-1e9)), -halves])
    values[len(SPECIAL) + 1 :][: 2 * len(near) : 2] = near
    return values


def words(values: np.ndarray) -> Words:
    bits: Words = np.asarray(values, np.float32).view(np.uint32)
    return bits


def near(ulps: int) -> object:
    """Agreement of fp32 values within so many units in the last place."""

    def agree(emulated: Words, other: Words) -> bool:
        a, b = emulated.view(np.float32).astype(np.float64), other.view(np.float32).astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            return bool((same | (np.abs(a - b) <= ulps * np.spacing(np.abs(b).astype(np.float32)))).all())

    return agree


def halves(count: int) -> Words:
    """Pairs of 16-bit integers, all different: what ends up where can be read from them."""
    return np.arange(count, dtype=np.uint32) * 2 | (np.arange(count, dtype=np.uint32) * 2 + 1) << 16


def any_words() -> Words:
    """Of any bits: as fp16 numbers some are NaN, infinite or subnormal."""
    return np.random.default_rng(3).integers(0, 2**32, 4096, dtype=np.uint32)


def fragments(kind: torch.dtype) -> Words:
    """For each of 64 lanes: a (4 words), b (2 words) of normal elements, d (4 words) in fp32."""
    generator = torch.Generator().manual_seed(3)
    elements = torch.randn(64, 12, generator=generator).to(kind).view(torch.int16).numpy().view(np.uint16).reshape(64, 6, 2)
    packed = elements[..., 0].astype(np.uint32) | elements[..., 1].astype(np.uint32) << 16
    return np.concatenate([packed, torch.randn(64, 4, generator=generator).numpy().view(np.uint32)], axis=1).ravel()


ADDED = """
    float* own = reinterpret_cast<float*>(out);
    for (int i = 0; i < 8; ++i) out[i] = in[t * 8 + i];
    out[7] = 0;
    barrier_sync();
    red_add_f32(own + 5, __uint_as_float(in[t]));
    red_add_f32(reinterpret_cast<float*>(p.out) + 7, static_cast<float>(t));
"""
ADDED_BY_FOURS = """
    for (int i = 0; i < 8; ++i) out[i] = in[t * 8 + i];
    const float four[4] = {__uint_as_float(in[t]), 1.0f, -0.5f, __uint_as_float(in[t + 64])};
    red_add_f32_v4(reinterpret_cast<float*>(out) + 4, four);
"""
MMA = """
    u32 a[4]; float d[4];
    for (int i = 0; i < 4; ++i) { a[i] = in[t * 10 + i]; d[i] = __uint_as_float(in[t * 10 + 6 + i]); }
    mma_sync_m16n8k16<ELEMENT>(d, a, in[t * 10 + 4], in[t * 10 + 5]);
    for (int i = 0; i < 4; ++i) out[i] = __float_as_uint(d[i]);
"""
LDMATRIX = """
    for (int i = 0; i < 4; ++i) store_shared(shared_memory() + (t * 4 + i) * 4, in[t * 4 + i]);
    barrier_sync();
    u32 fragment[4];
    ATOM(fragment, shared_memory() + (t * 13 % 64) * 16);
    for (int i = 0; i < 4; ++i) out[i] = fragment[i];
"""
COPY = """
    const SharedAddress own = shared_memory() + t * 64;
    cp_async_16(own, in + t * 4);
    cp_async_commit_group();
    cp_async_16(own + 16, in + t * 4, t % 3 != 0);
    cp_async_16(own + 32, in + (63 - t) * 4, true);
    cp_async_4(own + 52, in + t * 3);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    const uint4 first = load_shared_v4(own);
    cp_async_wait_group<0>();
    barrier_sync();
    const SharedAddress other = shared_memory() + (t * 5 % 64) * 64;
    const uint4 second = load_shared_v4(other + 16), third = load_shared_v4(other + 32);
    out[0] = first.x; out[1] = first.w; out[2] = second.y; out[3] = second.z; out[4] = third.x; out[5] = third.w;
    out[6] = load_shared(other + 52);
"""
# Results take the even words of the output; odd ones, 0xDEADBEEF before, are for words that threads share.
FLAG = """
    u32 *given = p.out + 1, *flag = p.out + 3;
    if (block_index() == SETTER) {
        if (thread_index() == 0) {
            *given = in[5];
            st_release_gpu(flag, 7);
        }
        out[0] = in[t];
    } else {
        while (ld_acquire_gpu(flag) != 7) {
        }
        out[0] = *given;
    }
"""
CLAIMS = """
    u32 *claims = p.out + 1, *drawn = p.out + 3;
    if (block_index() == 0 && thread_index() == 0) {
        *claims = 0;
        st_release_gpu(drawn, 1);
    }
    while (ld_acquire_gpu(drawn) == 0xDEADBEEFu) {
    }
    atom_add_acq_rel_gpu(drawn, atom_inc_relaxed_gpu(claims, 49));
    while (ld_acquire_gpu(drawn) != 1 + 2 * (49 * 50 / 2) + 27 * 28 / 2) {
    }
    out[0] = ld_acquire_gpu(claims);
"""
MEETING = """
    u32 *count = p.out + 1, *sum = p.out + 3;
    atom_add_acq_rel_gpu(sum, atom_add_acq_rel_gpu(count, 1) - 0xDEADBEEFu);
    while (ld_acquire_gpu(sum) != 0xDEADBEEFu + 127 * 128 / 2) {
    }
    out[0] = ld_acquire_gpu(count) - 0xDEADBEEFu;
"""


def mma_agrees(emulated: Words, other: Words) -> bool:
    """16 products of normal elements: within the rounding of fp32 sums of their size, in any order."""
    return bool(np.abs(emulated.view(np.float32).astype(np.float64) - other.view(np.float32)).max() <= 16 * 2.0**-23 * 16)


PROBES = [
    Probe(
        "index",
        "out[0] = thread_index(); out[1] = lane_index(); out[2] = warp_index(); out[3] = block_index();",
        lambda: halves(4),
        4,
        96,
        3,
    ),
    Probe(
        "set-f16",
        "out[0] = (set_lt_f16x2(in[t], in[t ^ 1]) & 0xff00ff) | (set_lt_f16x2(in[t], 0x7c00fc00u) & 0xff00ff00);",
        any_words,
        blocks=64,
    ),
    Probe("infinity", "out[0] = __float_as_uint(infinity());", lambda: halves(4)),
    *(
        Probe(
            f"cvt-{e}", f"out[0] = cvt_rn_x2<{e}>(__uint_as_float(in[t]), __uint_as_float(in[t ^ 1]));", lambda: words(floats()), blocks=64
        )
        for e in ("Bf16", "Fp16")
    ),
    Probe(
        "ex2",
        "out[0] = __float_as_uint(ex2_approx_ftz(__uint_as_float(in[t])));",
        lambda: words(np.concatenate([np.linspace(-140, 130, 4000), [-np.inf, np.inf, 0.0, -0.0, 1e-40, -3e38], np.zeros(90)])),
        blocks=64,
        agree=near(2),  # type: ignore[arg-type]
    ),
    Probe(
        "rcp",
        "out[0] = __float_as_uint(rcp_approx_ftz(__uint_as_float(in[t])));",
        lambda: words(floats()),
        blocks=64,
        agree=near(1),  # type: ignore[arg-type]
    ),
    Probe(
        "mul",
        "out[0] = __float_as_uint(mul_rn(__uint_as_float(in[t]), 1.1f) + 1.0f);"
        "const u64 high = mul_hi(in[t] * 0x100000001ull, ~0ull / 7);"
        "out[1] = static_cast<u32>(high); out[2] = static_cast<u32>(high >> 32);",
        lambda: words(floats()),
        3,
        blocks=64,
    ),
    Probe(
        "shfl",
        "for (int i = 0; i < 5; ++i)"
        "    out[i] = __float_as_uint(shfl_sync_bfly(__uint_as_float(in[t]), 1 << i)) ^ shfl_sync_bfly(in[t], 2 << i & 31);"
        "out[5] = shfl_sync_first(t * 3 + 1); out[6] = __float_as_uint(shfl_sync_idx(__uint_as_float(in[t]), 21));",
        lambda: words(np.arange(64)),
        7,
    ),
    Probe(
        "vote",
        "out[0] = vote_sync_any(in[t] == 40); out[1] = vote_sync_any(lane_index() > 99); out[2] = vote_sync_ballot(in[t] % 5 == 2);",
        lambda: np.arange(64, dtype=np.uint32),
        3,
    ),
    Probe(
        "ld-relaxed",
        "const int* words = reinterpret_cast<const int*>(in); out[0] = ld_relaxed_gpu(words + 63 - t);",
        lambda: words(np.arange(64)),
    ),
    Probe("popc", "out[0] = popc(in[t]); out[1] = popc(0); out[2] = popc(~0u);", lambda: halves(64), 3),
    Probe(
        "bits",
        "out[0] = leading_zeros(in[t]); out[1] = leading_zeros(in[t] >> t % 32); out[2] = leading_zeros(0);"
        "out[3] = trailing_zeros(in[t] | 1u << t % 32); out[4] = trailing_zeros(1u << t % 32);",
        lambda: halves(64),
        5,
    ),
    Probe(
        "shared",
        "const SharedAddress own = shared_memory() + t * 32;"
        "store_shared_v4(own, {in[t], 1, 2, in[t] + 3}); store_shared(own + 16, in[t] ^ 5);"
        "store_shared_v4(own + 16, {7, in[t], 8, 9}); barrier_warp_sync();"
        "const SharedAddress other = shared_memory() + (t ^ 7) * 32; const uint4 a = load_shared_v4(other), b = load_shared_v4(other + 16);"
        "out[0] = a.x; out[1] = a.w; out[2] = b.x; out[3] = b.y; out[4] = load_shared(other + 28);",
        lambda: halves(64),
        5,
    ),
    Probe(
        "shared-pair",
        "const SharedAddress own = shared_memory() + t * 8; store_shared(own, in[t]); store_shared(own + 4, in[t] ^ 9); barrier_sync();"
        "float a, b; load_shared_pair(a, b, shared_memory() + (t * 5 % 64) * 8); out[0] = __float_as_uint(a); out[1] = __float_as_uint(b);",
        lambda: halves(64),
        2,
    ),
    *(
        Probe(
            f"cvt-to-f32-{e}",
            f"float a, b; cvt_f32_x2<{e}>(a, b, in[t]); out[0] = __float_as_uint(a); out[1] = __float_as_uint(b);",
            lambda: halves(2**15),  # every element there is
            2,
            blocks=512,
            agree=near(0),  # type: ignore[arg-type]
        )
        for e in ("Bf16", "Fp16")
    ),
    Probe(
        "cvt-e4m3",
        "u32 pairs[2]; cvt_f16x2_e4m3x2(pairs, in[t]); out[0] = pairs[0]; out[1] = pairs[1];",
        lambda: np.arange(256, dtype=np.uint8).view(np.uint32),  # every element there is
        2,
        arch="sm_89",
    ),
    Probe(
        "cvt-to-e4m3",
        "out[0] = cvt_rn_satfinite_e4m3x2(__uint_as_float(in[t]), __uint_as_float(in[t ^ 1]));",
        lambda: words(around_e4m3()),
        blocks=64,
        arch="sm_89",
    ),
    Probe("prmt", "out[0] = prmt(in[t], 0x3120); out[1] = prmt(in[t] * 0x9e3779b9u, 0x0133);", any_words, 2),
    Probe("red", ADDED, lambda: words(floats(512)[len(SPECIAL) :].repeat(2)[:512]), 8, agree=near(0)),  # type: ignore[arg-type]
    Probe("red-v4", ADDED_BY_FOURS, lambda: words(floats(512)), 8, agree=near(0), arch="sm_90a"),  # type: ignore[arg-type]
    Probe("cp_async", COPY, lambda: halves(256), 7),
    Probe("ldmatrix", LDMATRIX.replace("ATOM", "ldmatrix_x4"), lambda: halves(256), 4),
    Probe("ldmatrix-trans", LDMATRIX.replace("ATOM", "ldmatrix_x4_trans"), lambda: halves(256), 4),
    Probe("mma-Bf16", MMA.replace("ELEMENT", "Bf16"), lambda: fragments(torch.bfloat16), 4, agree=mma_agrees),
    Probe("mma-Fp16", MMA.replace("ELEMENT", "Fp16"), lambda: fragments(torch.float16), 4, agree=mma_agrees),
    Probe(
        "register",
        "int x = t; u32 y = in[t]; launder(x); launder(y); launder(in); float z = y; compute_here(z); out[0] = in[x] ^ y ^ (z != y);",
        lambda: halves(64),
    ),
    *(Probe(f"flag-of-block-{n}", FLAG.replace("SETTER", str(n)), lambda: halves(128), 2, blocks=2, resident=2) for n in (0, 1)),
    Probe("meeting-of-blocks", MEETING, lambda: halves(1), 2, blocks=2, resident=2),
    Probe("claims-of-blocks", CLAIMS, lambda: halves(1), 2, blocks=2, resident=2),
    *hopper_probes.PROBES,
    *hopper_backward_probes.PROBES,
    *cluster_probes.PROBES,
]
BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    compile_at_once(PROBES)


def names(path: str) -> set[str]:
    """The functions that a file of atoms defines, or declares for the runtime, but for the runtime's own."""
    text = re.sub(r"//[^\n]*", "", templates.read(path))
    text = re.sub(r"^namespace emulator \{.*?^\}", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"(?:\b(?:__forceinline__|inline) |^(?=void ))[\w:]+[ &*]+(\w+)(?:<\w+>)?\(", text, flags=re.MULTILINE))


@pytest.mark.parametrize("name", ATOM_FILES)
def test_every_atom_has_a_emulated_twin(name: str) -> None:
    assert f"atoms/emulated/{name}.cuh" in templates.paths(), f"atoms/ptx/{name}.cuh has no twin atoms/emulated/{name}.cuh"
    atoms = names(f"atoms/ptx/{name}.cuh")
    assert atoms
    assert atoms - names(f"atoms/emulated/{name}.cuh") == set(), "these have no twin"


def test_no_twin_is_left_behind() -> None:
    assert {path for path in templates.paths() if path.startswith("atoms/emulated/")} == {
        f"atoms/emulated/{name}.cuh" for name in ATOM_FILES
    }


def test_every_atom_has_a_probe() -> None:
    bodies = " ".join(probe.body for probe in PROBES)
    missing = {atom for name in ATOM_FILES for atom in names(f"atoms/ptx/{name}.cuh") if not re.search(rf"\b{atom}\b", bodies)}
    assert missing == {"claim_region"}, "a guard that only the emulator has: see test_faults.py"


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_all_orders_agree(probe: Probe) -> None:
    first, *others = (probe.on_cpu(order) for order in ORDERS)
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_host_agrees_with_the_gpu(probe: Probe) -> None:
    if probe.arch == hopper_probes.ARCH != gpu(0).device.target.name:
        pytest.skip(f"needs a GPU of {probe.arch}")
    emulated, device = probe.on_cpu(EmulationOrder()), probe.on_gpu()
    assert probe.agree(emulated, device), f"{int((emulated != device).sum())} of {len(emulated)} words differ"


@pytest.mark.slow
def test_the_probes_compile_for_a_gpu() -> None:
    for probe in PROBES:
        compile_source(probe.source(), probe.arch)


@pytest.mark.parametrize(("element", "dtype"), [("Bf16", torch.bfloat16), ("Fp16", torch.float16)])
def test_cvt(element: str, dtype: torch.dtype) -> None:
    values = torch.from_numpy(floats())
    low = values.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    pairs = low | low.reshape(-1, 2)[:, ::-1].reshape(-1) << 16
    assert np.array_equal(BY_NAME[f"cvt-{element}"].on_cpu(EmulationOrder()), pairs)


@pytest.mark.parametrize(("element", "dtype"), [("Bf16", torch.bfloat16), ("Fp16", torch.float16)])
def test_cvt_to_f32(element: str, dtype: torch.dtype) -> None:
    probe = BY_NAME[f"cvt-to-f32-{element}"]
    elements = torch.from_numpy(probe.inputs().view(np.int16).copy()).view(dtype).float().numpy()
    found = probe.on_cpu(EmulationOrder()).view(np.float32)
    assert np.array_equal(found, elements, equal_nan=True)


def test_cvt_e4m3() -> None:
    wanted = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).half()
    found = torch.from_numpy(BY_NAME["cvt-e4m3"].on_cpu(EmulationOrder()).view(np.int16)).view(torch.half)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(found.signbit()[~found.isnan()], wanted.signbit()[~wanted.isnan()])


def test_cvt_to_e4m3() -> None:
    values = torch.from_numpy(around_e4m3())
    low = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    found = torch.from_numpy(BY_NAME["cvt-to-e4m3"].on_cpu(EmulationOrder()).view(np.int32))
    assert torch.equal(found, low | low.view(-1, 2).flip(1).reshape(-1) << 8)


def test_prmt() -> None:
    probe = BY_NAME["prmt"]
    given = np.stack([probe.inputs()[:64], probe.inputs()[:64] * np.uint32(0x9E3779B9)], axis=1).view(np.uint8).reshape(64, 2, 4)
    found = probe.on_cpu(EmulationOrder()).reshape(64, 2).view(np.uint8).reshape(64, 2, 4)
    assert np.array_equal(found[:, 0], given[:, 0][:, [0, 2, 1, 3]])
    assert np.array_equal(found[:, 1], given[:, 1][:, [3, 3, 1, 0]])


def test_red() -> None:
    for name, first in (("red", 5), ("red-v4", 4)):
        given = BY_NAME[name].inputs().view(np.float32).reshape(64, 8)
        found = BY_NAME[name].on_cpu(EmulationOrder()).view(np.float32).reshape(64, 8)
        with np.errstate(all="ignore"):
            expected = given[:, first] + given.reshape(-1)[:64]
        expected[np.abs(expected) < 2.0**-126] *= np.float32(0)
        assert np.array_equal(found[:, first], expected, equal_nan=True)
    assert BY_NAME["red"].on_cpu(EmulationOrder()).view(np.float32)[7] == 63 * 64 / 2


def test_ex2() -> None:
    x = BY_NAME["ex2"].inputs().view(np.float32).astype(np.float64)
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)
    with np.errstate(all="ignore"):
        power = np.exp2(x)
        expected = np.where(x == np.floor(x), power, power * (1 - 5.0e-8)).astype(np.float32)
    expected[np.abs(expected) < 2.0**-126] *= np.float32(0)
    assert near(1)(BY_NAME["ex2"].on_cpu(EmulationOrder()), expected.view(np.uint32))  # type: ignore[operator]


def test_rcp() -> None:
    x = BY_NAME["rcp"].inputs().view(np.float32)
    x = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
    with np.errstate(all="ignore"):
        expected = (1 / x.astype(np.float64)).astype(np.float32)
    expected = np.where(np.abs(expected) < np.float32(2.0**-126), np.copysign(np.float32(0), expected), expected)
    assert near(1)(BY_NAME["rcp"].on_cpu(EmulationOrder()), expected.view(np.uint32))  # type: ignore[operator]


def test_ldmatrix() -> None:
    """Lane l of a warp gets of matrix i row l/4, columns 2(l%4) and 2(l%4)+1; transposed, the same of the transposed matrix."""
    rows = halves(256).view(np.uint16).reshape(64, 8)
    for name, transposed in (("ldmatrix", False), ("ldmatrix-trans", True)):
        found = BY_NAME[name].on_cpu(EmulationOrder()).view(np.uint16).reshape(64, 4, 2)
        for t in range(64):
            for i in range(4):
                matrix = rows[[(t // 32 * 32 + 8 * i + r) * 13 % 64 for r in range(8)]]
                matrix = matrix.T if transposed else matrix
                lane = t % 32
                assert list(found[t, i]) == list(matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])


@pytest.mark.parametrize(("element", "dtype"), [("Bf16", torch.bfloat16), ("Fp16", torch.float16)])
def test_mma(element: str, dtype: torch.dtype) -> None:
    probe = BY_NAME[f"mma-{element}"]
    given = probe.inputs().reshape(2, 32, 10)
    found = probe.on_cpu(EmulationOrder()).view(np.float32).reshape(2, 32, 4)
    halves_of = torch.from_numpy(given[..., :6].copy().view(np.int16)).view(dtype).double().numpy().reshape(2, 32, 6, 2)
    for warp in range(2):
        a, b, d, result = np.empty((16, 16)), np.empty((16, 8)), np.empty((16, 8)), np.empty((16, 8))
        for lane in range(32):
            g, t = divmod(lane, 4)
            for half in range(2):
                for i in range(4):
                    a[g + i % 2 * 8, 2 * t + half + i // 2 * 8] = halves_of[warp, lane, i, half]
                for i in range(2):
                    b[2 * t + half + i * 8, g] = halves_of[warp, lane, 4 + i, half]
            for e in range(4):
                d[g + e // 2 * 8, 2 * t + e % 2] = given[warp, lane, 6 + e : 7 + e].view(np.float32)[0]
                result[g + e // 2 * 8, 2 * t + e % 2] = found[warp, lane, e]
        assert np.abs(result - (d + a @ b)).max() <= 2.0**-20
