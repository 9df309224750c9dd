"""The families of models that are known: the names of their weights, and who reads their config."""

from __future__ import annotations

from collections.abc import Callable

from mhalearn.interop import family_settings as settings
from mhalearn.interop.cuts import InFour, Latents
from mhalearn.interop.family import Family
from mhalearn.interop.family_settings import Beside
from mhalearn.interop.naming import Naming
from mhalearn.interop.projections import Block, Cut, Interleaved, Separate, Sizes, Stacked
from mhalearn.interop.rotary_config import Config

Settings = Callable[[Config, int, int], Beside]
SizesOf = Callable[[Config], Sizes]


# Masks and frequencies that older files keep, and a table that T5's cross-attention never used.
_IGNORED = r"rotary_emb\.inv_freq|bias|masked_bias|causal_mask|relative_attention_bias\.weight"


def _naming(
    name: str, block: str, reads: tuple[str, ...], cut: Cut, beside: Beside | None = None
) -> Naming:
    """The names of a block: weights and biases of `reads`, and what is read under another name."""
    full = tuple(f"{part}.{kind}" for part in reads for kind in ("weight", "bias"))
    return Naming(
        name=name,
        block=rf"(?P<root>(?:.*\.)?){block}",
        anchor=(f"{reads[-1]}.weight",),  # by which vision towers are named otherwise
        reads=(*full, *(beside or {})),
        ignores=_IGNORED,
        causal=True,
        factors=Block(cut, beside or {}),
    )


_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")
_OPT = ("q_proj", "k_proj", "v_proj", "out_proj")
_PHI = ("q_proj", "k_proj", "v_proj", "dense")
_T5 = ("q", "k", "v", "o")
_PHI3 = ("qkv_proj", "o_proj")
_FUSED = ("query_key_value", "dense")
_MPT = ("Wqkv", "out_proj")
_CODEGEN = ("qkv_proj", "out_proj")
_DEEPSEEK = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

_SELF_ATTENTION = r"layers\.(?P<layer>\d+)\.self_attn\."
_OF_WHISPER = r"(?:encoder|decoder)\.layers\.(?P<layer>\d+)\.self_attn\."
_OF_ENCODERS = r"encoder\.layers\.(?P<layer>\d+)\.attention\."
_CROSS = r"decoder\.layers\.(?P<layer>\d+)\.encoder_attn\."
_ATTN = r"h\.(?P<layer>\d+)\.attn\."
_T5_SELF = r"(?:encoder|decoder)\.block\.(?P<layer>\d+)\.layer\.0\.SelfAttention\."
_T5_CROSS = r"decoder\.block\.(?P<layer>\d+)\.layer\.1\.EncDecAttention\."

_GAINS = {"q_norm.weight": "query_gain", "k_norm.weight": "key_gain"}
T5_TABLE = {"relative_attention_bias.weight": "position_table"}
_SCALAR = "query_pre_attn_scalar"
_MULTIPLIER = ("attention_multiplier",)


def _separate(
    name: str,
    parts: tuple[str, str, str, str] = _LLAMA,
    block: str = _SELF_ATTENTION,
    beside: Beside | None = None,
) -> Naming:
    """Queries, keys, values and outputs under a name each."""
    return _naming(name, block, parts, Separate(*parts), beside)


def _like_llama(name: str, heads: Settings, knows: tuple[str, ...] = (), **beside: str) -> Family:
    """With Llama's names, and gains or sinks under those of `beside`."""
    kept = {file: ours for ours, file in beside.items()}
    return Family(name, _separate(name, beside=kept), settings.usual_sizes, heads, knows)


def _normed(name: str, heads: Settings) -> Family:
    return Family(name, _separate(name, beside=_GAINS), settings.usual_sizes, heads)


def _latent(name: str) -> Family:
    reads = (*_DEEPSEEK[:-1], "q_a_layernorm", "kv_a_layernorm", _DEEPSEEK[-1])
    naming = _naming(name, _SELF_ATTENTION, reads, Latents())
    kept = tuple(one for one in naming.reads if not one.endswith(".bias"))  # which are refused
    return Family(name, naming._replace(reads=kept), settings.deepseek_sizes, settings.deepseek)


def _fused(name: str, block: str, sizes: SizesOf, heads: Settings) -> Family:
    return Family(name, _naming(name, block, _FUSED, Interleaved(*_FUSED)), sizes, heads)


def _encoder(name: str) -> Family:
    return Family(
        name,
        _separate(name, _OPT, _OF_ENCODERS),
        settings.usual_sizes,
        settings.plain,
        by_place=settings.nowhere_causal,
    )


_GEMMA3 = _normed("Gemma 3", settings.gemma3)._replace(knows=(_SCALAR,), gain_offset=1.0)
_OF_T5 = Family(
    "T5",
    _separate("T5", _T5, _T5_SELF, T5_TABLE),
    settings.t5_sizes,
    settings.t5,
    by_place=settings.in_decoders,
    cross=_separate("T5", _T5, _T5_CROSS),
)

FAMILIES: dict[str, Family] = {
    "llama": _like_llama("Llama", settings.llama),
    "gemma": _like_llama("Gemma", settings.llama),
    "granite": _like_llama("Granite", settings.granite, _MULTIPLIER),
    "granitemoe": _like_llama("Granite MoE", settings.granite, _MULTIPLIER),
    "granitemoeshared": _like_llama("Granite MoE shared", settings.granite, _MULTIPLIER),
    "granitemoehybrid": _like_llama("Granite hybrid", settings.granite_hybrid, _MULTIPLIER),
    "mixtral": _like_llama("Mixtral", settings.windowed),
    "starcoder2": _like_llama("StarCoder2", settings.windowed),
    "mistral": _like_llama("Mistral", settings.windowed),
    "qwen2": _like_llama("Qwen2", settings.qwen2),
    "qwen2_moe": _like_llama("Qwen2 MoE", settings.qwen2),
    "qwen3": _normed("Qwen3", settings.qwen3),
    "qwen3_moe": _normed("Qwen3 MoE", settings.qwen3_moe),
    "gemma2": _like_llama("Gemma 2", settings.gemma2, (_SCALAR, "attn_logit_softcapping")),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": Family("Phi", _separate("Phi", _PHI), settings.usual_sizes, settings.phi),
    "phi3": Family(
        "Phi-3",
        _naming("Phi-3", _SELF_ATTENTION, _PHI3, Stacked(*_PHI3)),
        settings.usual_sizes,
        settings.windowed,
    ),
    "olmo": _like_llama("OLMo", settings.llama),
    "olmo2": _normed("OLMo 2", settings.olmo2),
    "olmo3": _normed("OLMo 3", settings.olmo3),
    "olmoe": _normed("OLMoE", settings.olmo2),
    "apertus": _normed("Apertus", settings.apertus),
    "smollm3": _like_llama("SmolLM3", settings.smollm3, ("no_rope_layers",)),
    "stablelm": _like_llama("StableLM", settings.stablelm),
    "cohere": _like_llama("Cohere", settings.cohere),
    "cohere2": _like_llama("Cohere 2", settings.cohere2),
    "gpt_oss": _like_llama("gpt-oss", settings.gpt_oss, sink="sinks"),
    "deepseek_v2": _latent("DeepSeek-V2"),
    "deepseek_v3": _latent("DeepSeek-V3"),
    "gpt_neox": _fused(
        "GPT-NeoX",
        r"layers\.(?P<layer>\d+)\.attention\.",
        settings.usual_sizes,
        settings.gpt_neox,
    ),
    "bloom": _fused(
        "BLOOM", r"h\.(?P<layer>\d+)\.self_attention\.", settings.usual_sizes, settings.bloom
    ),
    "falcon": _fused(
        "Falcon", r"h\.(?P<layer>\d+)\.self_attention\.", settings.falcon_sizes, settings.falcon
    ),
    "gptj": Family("GPT-J", _separate("GPT-J", _OPT, _ATTN), settings.usual_sizes, settings.gptj),
    "codegen": Family(
        "CodeGen",
        _naming("CodeGen", _ATTN, _CODEGEN, InFour(*_CODEGEN)),
        settings.usual_sizes,
        settings.gptj,
    ),
    "gpt_neo": Family(
        "GPT-Neo",
        _separate("GPT-Neo", _OPT, r"h\.(?P<layer>\d+)\.attn\.attention\."),
        settings.usual_sizes,
        settings.gpt_neo,
    ),
    "opt": Family("OPT", _separate("OPT", _OPT), settings.usual_sizes, settings.plain),
    "xglm": Family("XGLM", _separate("XGLM", _OPT), settings.usual_sizes, settings.plain),
    "mpt": Family(
        "MPT",
        _naming("MPT", r"blocks\.(?P<layer>\d+)\.attn\.", _MPT, Stacked(*_MPT)),
        settings.usual_sizes,
        settings.mpt,
    ),
    "t5": _OF_T5,
    "mt5": _OF_T5._replace(name="mT5"),
    "whisper": Family(
        "Whisper",
        _separate("Whisper", _OPT, _OF_WHISPER),
        settings.whisper_sizes,
        settings.plain,
        by_place=settings.in_decoders,
        cross=_separate("Whisper", _OPT, _CROSS),
    ),
    "hubert": _encoder("HuBERT"),
    "wav2vec2": _encoder("wav2vec 2.0"),
}
