"""diffusers' backends and processors: refusals, and tiny models beside the same ones by PyTorch, in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from tests.support.dense_attention import require_right

ours = pytest.importorskip("flashgen.integrations.diffusers", reason="needs diffusers", exc_type=ImportError)
diffusers: Any = pytest.importorskip("diffusers")
dispatch: Any = pytest.importorskip("diffusers.models.attention_dispatch")
processors: Any = pytest.importorskip("diffusers.models.attention_processor")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.manual_seed(1)
    ours.register()
    yield
    ours.unregister()


def tensors(len_q: int = 20, len_kv: int = 36, heads_kv: int = 2) -> Any:
    """[batch, heads, length, head_dim]"""
    sizes = (2, len_q), (heads_kv, len_kv), (heads_kv, len_kv)
    return [torch.randn(2, heads, length, 16).to(torch.bfloat16) for heads, length in sizes]


def by_backend(**arguments: Any) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in given)
        with diffusers.attention_backend("flashgen"):
            return (dispatch.dispatch_attention_fn(q, k, v, **arguments).transpose(1, 2),)

    return call


def close(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """A model's outputs: no farther from those in fp32 than twice what PyTorch's are."""
    apart, allowed = ((tensor.float() - exact.float()).abs().max() for tensor in (found, plain))
    assert 0 < apart <= 2 * allowed


def test_a_call() -> None:
    require_right(by_backend(), tensors(), lambda scores: scores)


@pytest.mark.slow
def test_masks_and_keywords() -> None:
    seen, bias, of_keys = torch.rand(2, 1, 20, 36) < 0.7, torch.randn(2, 2, 1, 36), torch.rand(2, 36) < 0.7
    later = torch.arange(36) > torch.arange(20)[:, None]
    require_right(by_backend(attn_mask=seen), tensors(), lambda scores: scores.masked_fill(~seen, -torch.inf))
    require_right(by_backend(attn_mask=of_keys), tensors(), lambda scores: scores.masked_fill(~of_keys[:, None, None], -torch.inf))
    require_right(by_backend(attn_mask=bias), tensors(), lambda scores: scores + bias, gradients=True)
    require_right(by_backend(is_causal=True, scale=0.5), tensors(), lambda scores: scores.masked_fill(later, -torch.inf), 0.5)
    require_right(by_backend(enable_gqa=True), tensors(heads_kv=1), lambda scores: scores)
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors())
    out, lse = ours.attention_of_backend(q, k, v, dropout_p=False, return_lse=True)
    assert out.shape == (2, 20, 2, 16)
    assert lse.shape == (2, 2, 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(2, 36, dtype=torch.bool), "is_causal": True}, "is_causal must be False beside attn_mask"),
        ({"_parallel_config": 1}, "_parallel_config must be None: choose one of diffusers' own backends"),
        ({"attn_mask": 3}, "attn_mask must be a tensor or a block mask; got 3"),
        ({"attn_mask": torch.zeros(2, 2, 20, 35)}, "^attn_mask must"),
        ({"attn_mask": torch.zeros(2, 1, 20, 36, dtype=torch.int64)}, "^attn_mask must be torch.bool, .* query's torch.bfloat16; got"),
        ({"dropout_p": 2.0}, "^dropout_p must"),
        ({"dropout_p": None}, "^dropout_p must be a number from 0 to 1; got None"),
        ({"is_causal": "top_left"}, "^is_causal must be of type bool; got 'top_left'"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    given = [tensor.transpose(1, 2) for tensor in tensors()]
    with pytest.raises(ArgumentError, match=message):
        ours.attention_of_backend(*given, **arguments)


def test_heads_need_enable_gqa_and_dtypes_are_named() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(heads_kv=1))
    with pytest.raises(ArgumentError, match="key must have query's 2 heads, or enable_gqa must be True; got 1 heads"):
        ours.attention_of_backend(q, k, v)
    with pytest.raises(ArgumentError, match=r"^query must be torch.bfloat16 or torch.float16; got torch.float32"):
        ours.attention_of_backend(q.float(), k.float(), v.float(), enable_gqa=True)
    with pytest.raises(ArgumentError, match=r"^key must have query's batch size 2; got 1"):
        ours.attention_of_backend(q, k[:1], v[:1], enable_gqa=True)
    with pytest.raises(ArgumentError, match=r"^query must be of type Tensor; got None"):
        ours.attention_of_backend(None, k, v)
    with pytest.raises(ArgumentError, match=r"^key must have 4 dimensions \(batch, length, heads, head_dim\); got 2"):
        ours.attention_of_backend(q, k[0, 0], v)


@pytest.mark.parametrize("scale_qk", [True, False])
def test_modules_without_a_scale_of_scores_have_none(scale_qk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, **_: Any) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)

    monkeypatch.setattr(ours, "_attention", plain)
    module, states = processors.Attention(32, heads=2, dim_head=16, scale_qk=scale_qk), torch.randn(2, 9, 32) * 3
    expected = module(states)
    module.set_processor(ours.AttnProcessor())
    torch.testing.assert_close(module(states), expected)


def test_the_name_comes_and_goes() -> None:
    ours.register()
    names = dispatch.AttentionBackendName
    assert names("flashgen") is names.FLASHGEN
    assert names.FLASHGEN in list(names)
    with diffusers.attention_backend("flashgen"):
        assert dispatch._AttentionBackendRegistry.get_active_backend()[1] is ours.attention_of_backend
    ours.unregister()
    assert "flashgen" not in {name.value for name in names.__members__.values()}
    with pytest.raises(ValueError, match="flashgen"):
        names("flashgen")


@pytest.mark.slow
def test_a_flux_transformer() -> None:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    image, text, pooled = torch.randn(1, 16, 4), torch.randn(1, 8, 16), torch.randn(1, 8)
    ids, time = (torch.zeros(16, 3), torch.zeros(8, 3)), torch.tensor([0.5])
    ids[0][:, 1] = torch.arange(16)

    def of(dtype: torch.dtype) -> Any:
        given = (tensor.to(dtype) for tensor in (image, text, pooled, time))
        return model.to(dtype)(*given, img_ids=ids[0], txt_ids=ids[1], return_dict=False)[0]

    with torch.no_grad():
        exact, plain = of(torch.float32), of(torch.bfloat16)
        model.set_attention_backend("flashgen")
        found = of(torch.bfloat16)
        model.set_attention_backend("native")
    assert not torch.equal(found, plain)
    close(found, exact, plain)


@pytest.mark.slow
def test_a_unet() -> None:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=8,
    ).eval()
    image, text, padding = torch.randn(1, 4, 8, 8), torch.randn(1, 8, 16), torch.tensor([[1] * 6 + [0] * 2])

    def of(dtype: torch.dtype) -> Any:
        model.to(dtype)
        given = image.to(dtype), torch.tensor([3]), text.to(dtype)
        return model(*given, encoder_attention_mask=padding, return_dict=False)[0]

    with torch.no_grad():
        exact, plain = of(torch.float32), of(torch.bfloat16)
        model.set_attn_processor(ours.AttnProcessor())
        found = of(torch.bfloat16)
    assert not torch.equal(found, plain)
    close(found, exact, plain)
