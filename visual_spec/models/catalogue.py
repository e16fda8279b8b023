"""The table of supported models: how each was verified, and how much memory it needs. Plain data, no PyTorch.

Sizes are those of the official weights; the tests recompute them on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

from visual_spec.models.core.calls import (
    CHUNKS,
    COLUMNS,
    CONTINUOUS,
    DISTILLED,
    MASKED,
    RASTER_TREE_ORDER,
    SCALES,
)


@dataclass(frozen=True)
class KnownModel:
    """One model.

    Attributes:
        name: name for display.
        weights: the official files or repository; "" if none are released.
        load: the function that loads it.
        pixels: side of the pictures; 0 for an audio model.
        tokens: slots of a picture, or columns of a clip.
        prefix: positions before the first token (for a prompt of usual length if it is not fixed).
        parameters: number of weights of the token model, without tokenizers and text encoders.
        cached: numbers that the cache holds for one position of one row: keys and values of all layers.
        uncached: slots that nothing reads and that are not cached: the last scale of a next-scale model.
        calls: the kinds of calls it answers.
        verified: a key of `VERIFIED`.
    """

    name: str
    weights: str
    load: str
    pixels: int
    tokens: int
    prefix: int
    parameters: int
    cached: int
    verified: str
    calls: tuple[str, ...] = RASTER_TREE_ORDER
    uncached: int = 0

    def memory(self, bytes_each: int, *, batch_size: int = 1, guided: bool = True) -> int:
        """Return the bytes of weights and cache while `batch_size` pictures are drawn.

        Args:
            bytes_each: bytes of a number: 4 for float32, 2 for bfloat16.
        """
        rows = batch_size * (2 if guided else 1)
        held = self.prefix + self.tokens - self.uncached
        return (self.parameters + rows * held * self.cached) * bytes_each


VERIFIED = {
    "embedded": "trained here; tokens, pictures and prompt accuracy in tests/pipelines/test_embedded.py",
    "official layout": "keys and shapes of the official layout, logits equal to a straight-line computation; the "
    "released weights themselves were not run",
    "transformers": "tiny random configurations equal transformers' own generate token for token; the released "
    "weights themselves were not run",
}

_CLASSES, _TEXT = "ClassImagePipeline.from_official", "ImagePipeline.from_official"


def _llamagen(
    preset: str, layers: int, dim: int, pixels: int, parameters: int, weights: str = "", text: bool = False
) -> KnownModel:
    return KnownModel(
        name=f"LlamaGen-{preset} {'text' if text else 'class'} {pixels}",
        weights=weights,
        load=_TEXT if text else _CLASSES,
        pixels=pixels,
        tokens=(pixels // 16) ** 2,
        prefix=120 if text else 1,
        parameters=parameters,
        cached=2 * layers * dim,
        verified="official layout",
    )


def _var(depth: int, pixels: int, parameters: int) -> KnownModel:
    tokens, last = {256: (680, 16 * 16), 512: (2240, 32 * 32)}[pixels]
    return KnownModel(
        name=f"VAR-d{depth} class {pixels}",
        weights=f"var_d{depth}.pth",
        load="ScaleImagePipeline.from_official",
        pixels=pixels,
        tokens=tokens,
        prefix=0,
        parameters=parameters,
        cached=2 * depth * 64 * depth,
        verified="official layout",
        calls=(SCALES,),
        uncached=last,
    )


def _musicgen(size: str, layers: int, dim: int, parameters: int, *, stereo: bool = False) -> KnownModel:
    return KnownModel(
        name=f"MusicGen-{size}{' stereo' if stereo else ''} 30 s",
        weights=f"facebook/musicgen-{'stereo-' if stereo else ''}{size}",
        load="AudioPipeline.from_musicgen, visual_spec.accelerate(model)",
        pixels=0,
        tokens=30 * 50 + 3,
        prefix=1 + 20,  # the empty step, and the words
        parameters=parameters,
        cached=2 * layers * dim,
        verified="transformers",
        calls=(COLUMNS,),
    )


def _magnet(size: str, seconds: int, layers: int, dim: int, parameters: int) -> KnownModel:
    return KnownModel(
        name=f"MAGNeT-{size} {seconds} s",
        weights=f"facebook/magnet-{size}-{seconds}secs",
        load="AudioPipeline.from_magnet",
        pixels=0,
        tokens=seconds * 50,
        prefix=0,
        parameters=parameters,
        cached=0,  # every step scores the whole clip again
        verified="official layout",
        calls=(MASKED,),
    )


def _mar(size: str, parameters: int) -> KnownModel:
    return KnownModel(
        name=f"MAR-{size} class 256",
        weights="checkpoint-last.pth",
        load="LatentImagePipeline.from_official",
        pixels=256,
        tokens=256,
        prefix=64,  # places that hold the class
        parameters=parameters,
        cached=0,  # every call reads all known tokens again
        verified="official layout",
        calls=(CONTINUOUS,),
    )


def _student(name: str, weights: str, parameters: int, *, of_var: bool = False) -> KnownModel:
    return KnownModel(
        name=f"DD1 student {name} class 256",
        weights=weights,
        load="DistilledScalePipeline.from_official" if of_var else "DistilledImagePipeline.from_official",
        pixels=256,
        tokens=680 if of_var else 256,
        prefix=1,
        parameters=parameters,
        cached=0,  # a call reads the whole picture
        verified="official layout",
        calls=(DISTILLED,),
    )


def _infinity(name: str, weights: str, pixels: int, parameters: int, layers: int, dim: int) -> KnownModel:
    scales = {1024: (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64), 512: (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)}
    tokens = sum(side * side for side in scales[pixels])
    return KnownModel(
        name=name,
        weights=weights,
        load="InfinityPipeline.from_official",
        pixels=pixels,
        tokens=tokens,
        prefix=0,
        parameters=parameters,
        cached=2 * layers * dim,
        verified="official layout",
        calls=(SCALES,),
        uncached=scales[pixels][-1] ** 2,
    )


def _maskgit(preset: str, pixels: int, parameters: int, weights: str) -> KnownModel:
    return KnownModel(
        name=f"MaskGIT-{preset} class {pixels}",
        weights=weights,
        load="MaskedClassImagePipeline.from_official",
        pixels=pixels,
        tokens=(pixels // 16) ** 2,
        prefix=0,
        parameters=parameters,
        cached=0,  # every step scores the whole picture again
        verified="official layout",
        calls=(MASKED,),
    )


def _mage(preset: str, parameters: int, weights: str) -> KnownModel:
    return KnownModel(
        name=f"MAGE-{preset} 256",
        weights=weights,
        load="MageImagePipeline.from_official",
        pixels=256,
        tokens=256,
        prefix=0,
        parameters=parameters,
        cached=0,
        verified="official layout",
        calls=(MASKED,),
    )


MODELS = [
    _llamagen("B", 12, 768, 256, 110_888_448, "c2i_B_256.pt"),
    _llamagen("B", 12, 768, 384, 110_888_448, "c2i_B_384.pt"),
    _llamagen("L", 24, 1024, 256, 342_910_976, "c2i_L_256.pt"),
    _llamagen("L", 24, 1024, 384, 342_910_976, "c2i_L_384.pt"),
    _llamagen("XL", 36, 1280, 384, 774_699_520, "c2i_XL_384.pt"),
    _llamagen("XXL", 48, 1536, 384, 1_410_972_672, "c2i_XXL_384.pt"),
    _llamagen("XXXL", 48, 2560, 384, 3_893_027_840),
    _llamagen("1B", 22, 2048, 384, 1_199_616_000),
    _llamagen("3B", 24, 3200, 384, 3_096_659_200, "c2i_3B_384.pt"),
    _llamagen("7B", 32, 4096, 384, 6_614_589_440),
    _llamagen("XL", 36, 1280, 256, 777_923_840, "t2i_XL_stage1_256.pt", text=True),
    _llamagen("XL", 36, 1280, 512, 777_923_840, "t2i_XL_stage2_512.pt", text=True),
    KnownModel(
        "ControlAR text 512", "edge_base.safetensors, depth_base.safetensors", _TEXT,
        512, 1024, 120, 881_543_680, 2 * 36 * 1280, "official layout",
    ),
    _student("B", "llamagen-B.pt", 98_321_672),
    _student("L", "llamagen-L.pt", 326_155_272),
    _student("VAR-d16", "var-d16.pth", 328_165_664, of_var=True),
    _student("VAR-d20", "var-d20.pth", 635_399_088, of_var=True),
    _student("VAR-d24", "var-d24.pth", 1_092_478_560, of_var=True),
    _var(16, 256, 310_283_520),
    _var(20, 256, 600_917_136),
    _var(24, 256, 1_033_399_360),
    _var(30, 256, 2_010_020_356),
    _var(36, 512, 2_353_893_904),
    # Sizes of transformers' default configurations, which match the released weights.
    KnownModel(
        "Chameleon-7B, Anole-7B", "leloy/Anole-7b-v0.1-hf", "visual_spec.accelerate(model)",
        512, 1024, 64, 7_013_666_816, 2 * 32 * 4096, "transformers",
    ),
    KnownModel(
        "Lumina-mGPT-7B 768", "Alpha-VLLM/Lumina-mGPT-7B-768", "visual_spec.accelerate(model)",
        768, 48 * 49, 64, 7_013_666_816, 2 * 32 * 4096, "transformers",
    ),
    KnownModel(
        "Emu3-Gen", "BAAI/Emu3-Gen-hf", "visual_spec.accelerate(model)",
        720, 90 * 91, 64, 8_492_011_520, 2 * 32 * 1024, "transformers",
    ),
    KnownModel(
        "GLM-Image, its token stage", "zai-org/GLM-Image", "visual_spec.accelerate(model)",
        1024, 32 * 32 + 16 * 16, 64, 8_914_788_352, 2 * 40 * 256, "transformers",
    ),
    _musicgen("small", 24, 1024, 420_371_456),
    _musicgen("medium", 48, 1536, 1_838_737_920),
    _musicgen("large", 48, 2048, 3_256_956_928),
    _musicgen("small", 24, 1024, 437_152_768, stereo=True),
    _musicgen("medium", 48, 1536, 1_863_909_888, stereo=True),
    _musicgen("large", 48, 2048, 3_290_519_552, stereo=True),
    _infinity("Infinity-2B", "infinity_2b_reg.pth", 1024, 2_204_564_032, 32, 2048),
    _infinity("Infinity-8B", "infinity_8b_weights", 1024, 8_375_791_824, 40, 3584),
    _infinity("Infinity-8B 512", "infinity_8b_512x512_weights", 512, 8_375_791_824, 40, 3584),
    _maskgit("T", 256, 23_031_425, "ImageNet_256_tiny.pth"),
    _maskgit("S", 256, 69_344_769, "ImageNet_256_small.pth"),
    _maskgit("S", 384, 69_508_609, "ImageNet_384_small.pth"),
    _maskgit("B", 256, 142_224_641, "ImageNet_256_base.pth"),
    _maskgit("B", 384, 142_470_401, "ImageNet_384_base.pth"),
    _maskgit("L", 384, 479_984_641, "ImageNet_384_large.pth"),
    _mage("B", 144_896_745, "mage-vitb-1600.pth"),
    _mage("L", 407_788_521, "mage-vitl-1600.pth"),
    _magnet("small", 10, 24, 1024, 420_371_456),
    _magnet("small", 30, 24, 1024, 420_371_456),
    _magnet("medium", 10, 48, 1536, 1_838_737_920),
    _magnet("medium", 30, 48, 1536, 1_838_737_920),
    KnownModel(  # both stages; the length is the caller's
        "MaskGCT 10 s", "amphion/MaskGCT", "MaskgctPipeline.from_official",
        0, 500, 300, 1_430_188_032, 0, "official layout", (MASKED,),
    ),
    _mar("B", 207_924_768),
    _mar("L", 478_326_304),
    _mar("H", 942_403_104),
]  # fmt: skip

# Families of transformers whose sizes differ between releases: supported, but not in the table of memory.
OTHER_MODELS = {"Janus, Janus-Pro": ("visual_spec.accelerate(model)", "transformers")}

# Memory in addition to `KnownModel.parameters`.
EXTRAS = {
    "VQ-16 tokenizer": 71_883_403,
    "VQ-8 tokenizer": 70_109_835,
    "VAR tokenizer": 108_948_355,
    "KL-16 tokenizer": 66_456_019,
    "flan-t5-xl encoder": 1_223_527_424,
    "t5-base encoder": 109_628_544,
    "MAGE tokenizer": 54_515_587,
    "MaskGCT codecs": 192_909_258,
}

# The calls that the models of a pipeline answer.
PIPELINES = {
    "ImagePipeline": RASTER_TREE_ORDER,
    "VideoPipeline": RASTER_TREE_ORDER,
    "ChunkVideoPipeline": (CHUNKS,),
    "ClassImagePipeline": RASTER_TREE_ORDER,
    "LatentImagePipeline": (CONTINUOUS,),
    "DistilledImagePipeline": (DISTILLED,),
    "DistilledScalePipeline": (DISTILLED,),
    "DistilledTextImagePipeline": (DISTILLED,),
    "AmusedImagePipeline": (MASKED,),
    "MageImagePipeline": (MASKED,),
    "MaskedImagePipeline": (MASKED,),
    "MaskedClassImagePipeline": (MASKED,),
    "MaskgctPipeline": (MASKED,),
    "ScaleImagePipeline": (SCALES,),
    "AudioPipeline": (COLUMNS, MASKED),
    "InfinityPipeline": (SCALES,),
}
