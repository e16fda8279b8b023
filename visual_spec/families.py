"""The table of model families. Plain data, without PyTorch; `records` says what an entry holds.

Exports, the classes that saved folders name, the kinds of calls, cards, `visual-spec models`, drafters, the settings
that `bench` and `eval` measure, and the words for a sample all read this table, and what other packages register
(docs/EXTENDING.md).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from visual_spec.records import (
    AsSaved,
    Family,
    FileLayout,
    KnownModel,
    Measured,
    OfficialFile,
    PipelineEntry,
    Saved,
)
from visual_spec.samplers.registry import (
    ANY_ORDER,
    BLOCKS,
    CHUNKS,
    COLUMNS,
    CONTINUOUS,
    FRAMES,
    MASKED,
    OWN_ORDER,
    RASTER_TREE_ORDER,
    SAMPLERS,
    SCALES,
    all_samplers,
    registered,
)

# fmt: off
PIPELINES = {entry.class_name: entry for entry in (
    PipelineEntry("amused_image:AmusedImagePipeline", "image", "text", "text-to-image"),
    PipelineEntry("audio:AudioPipeline", "audio", "text", "text-to-audio"),
    PipelineEntry("bitdance_image:BitDanceImagePipeline", "image", "text", "text-to-image"),
    PipelineEntry("chunk_video:ChunkVideoPipeline", "video", "text", "text-to-video"),
    PipelineEntry("class_image:ClassImagePipeline", "image", "label", "unconditional-image-generation"),
    PipelineEntry("dimoo_image:DimooImagePipeline", "image", "text", "text-to-image"),
    PipelineEntry("image:ImagePipeline", "image", "text", "text-to-image"),
    PipelineEntry("infinity:InfinityPipeline", "image", "text", "text-to-image"),
    PipelineEntry("continuous_image:ContinuousImagePipeline", "image", "label", "unconditional-image-generation"),
    PipelineEntry("mage_image:MageImagePipeline", "image", "", "unconditional-image-generation"),
    PipelineEntry("masked_class_image:MaskedClassImagePipeline", "image", "label", "unconditional-image-generation"),
    PipelineEntry("masked_image:MaskedImagePipeline", "image", "text", "text-to-image"),
    PipelineEntry("maskgct:MaskgctPipeline", "audio", "text", "text-to-speech"),
    PipelineEntry("scale_image:ScaleImagePipeline", "image", "label", "unconditional-image-generation"),
    PipelineEntry("video:VideoPipeline", "video", "text", "text-to-video"),
)}

# Names of classes in folders and programs of earlier versions.
FORMER = {
    "CausalLatentTransformer": "CausalContinuousTransformer", "LatentImagePipeline": "ContinuousImagePipeline",
    "LlamaGenTwoHeads": "LlamaGenNearToFar",
}
_PICTURES = ("ImagePipeline", "ClassImagePipeline")
_LLAMAGEN = ("next_token.llamagen:LlamaGenTransformer", "next_token.llamagen_vq:VQModel")
_CAPTIONS = ("text.caption_encoder:CaptionEncoder", "text.t5_features:T5Features")
_JACOBI = ("EagleDrafter", "LlamaGenTransformer")
_TEXT, _ACCELERATE = "ImagePipeline.from_official", "visual_spec.accelerate(model)"
_AT = "next_token.llamagen_checkpoint"
GPT = OfficialFile("transformer", f"{_AT}:name_of", ("tok_embeddings.weight",),
    f"{_AT}:load_transformer", "image_size", pipeline="ClassImagePipeline", lacks=("cls_embedding.uncond_embedding",))
_GPT_OF_TEXT = replace(GPT, recognise=("tok_embeddings.weight", "cls_embedding.uncond_embedding"), lacks=(),
    pipeline="ImagePipeline")
VQ = OfficialFile("vq_model", f"{_AT}:name_of", ("quantize.embedding.weight",), f"{_AT}:load_tokenizer", "image_size")
VAR = OfficialFile("transformer", "next_scale.var:name_of", "next_scale.var:is_var",
    "next_scale.var:load_var_checkpoint", pipeline="ScaleImagePipeline")
VAR_VQ = OfficialFile("vq_model", "VAR's tokenizer", ("quantize.quant_resi.*",),
    "next_scale.var_vq:load_var_vq_checkpoint", "scales", "next_scale.var:scales_of_size")
_ARPG = OfficialFile("transformer", "next_token.arpg:name_of", ("layers.self_dec.0.attn.to_q.weight",
    "layers.cross_dec.0.attn.to_q.weight"), "next_token.arpg:load_arpg", "image_size", pipeline="ClassImagePipeline")
_LPD = OfficialFile("transformer", "next_token.lpd:name_of", ("fake_latent", "mask_token", "token_emb.weight",
    "z_proj_ln.weight"), "next_token.lpd:load_lpd", "image_size", pipeline="ClassImagePipeline")
_FLEXVAR = OfficialFile("transformer", "next_scale.flexvar:name_of", "next_scale.flexvar:is_flexvar",
    "next_scale.flexvar:load_flexvar", "scales", "next_scale.flexvar:scales_of_size", "ScaleImagePipeline")
_FLEXVAE = OfficialFile("vq_model", "FlexVAR's tokenizer", "next_scale.flexvar:is_flexvae",
    "next_scale.flexvar:load_flexvae", "scales", "next_scale.flexvar:scales_of_size")
KL16 = OfficialFile("vae", "KL-16", ("post_quant_conv.weight",),
    "continuous.mar_checkpoint:load_kl16_checkpoint", lacks=("quantize*",))
_NEEDS_VQ, _NEEDS_VAR_VQ = "vq_ds16_c2i.pt", "vae_ch160v4096z32.pth"
# Fewer calls by confidence and in Halton's order, and by entropy. All are compared with one token a call,
# the law of the model alone, and measure how far they are from it; groups of a causal layer have a law of their own.
_HALTON = {"schedule": ["arccos"], "clock": ["halton"], "score": ["halton"]}
# Noise on the choice belongs to the order of confidence, which is not the saved one where that is fixed.
_CONFIDENT, _METER = {"choice_temperature": [Saved(1.0)]}, {"measure": [True]}
_MASKED_PICTURES = (
    Measured("masked", {"steps": [4, 8, 16, 32], **_CONFIDENT, **_METER}),
    Measured("masked", {"steps": [4, 8, 16, 32], **_HALTON, **_METER}),
    Measured("masked", {"steps": [256], "score": ["entropy"], "entropy_bound": [0.1, 1.0], **_METER}),
)
FAMILIES = (
    Family(
        "LlamaGen", RASTER_TREE_ORDER, _PICTURES,
        (*_LLAMAGEN, *_CAPTIONS, "drafters.eagle:EagleDrafter"),
        plain="autoregressive", fast="speculative-jacobi", drafters=_JACOBI, load="ClassImagePipeline.from_official",
        layout=FileLayout((_GPT_OF_TEXT, GPT, VQ),
            size="image_size", tokenizer=_NEEDS_VQ),
        sizes=(
            KnownModel("LlamaGen-B class 256", "c2i_B_256.pt", 256, 256, 1, 110_888_448, 2 * 12 * 768),
            KnownModel("LlamaGen-B class 384", "c2i_B_384.pt", 384, 576, 1, 110_888_448, 2 * 12 * 768),
            KnownModel("LlamaGen-L class 256", "c2i_L_256.pt", 256, 256, 1, 342_910_976, 2 * 24 * 1024),
            KnownModel("LlamaGen-L class 384", "c2i_L_384.pt", 384, 576, 1, 342_910_976, 2 * 24 * 1024),
            KnownModel("LlamaGen-XL class 384", "c2i_XL_384.pt", 384, 576, 1, 774_699_520, 2 * 36 * 1280),
            KnownModel("LlamaGen-XXL class 384", "c2i_XXL_384.pt", 384, 576, 1, 1_410_972_672, 2 * 48 * 1536),
            KnownModel("LlamaGen-XXXL class 384", "", 384, 576, 1, 3_893_027_840, 2 * 48 * 2560),
            KnownModel("LlamaGen-1B class 384", "", 384, 576, 1, 1_199_616_000, 2 * 22 * 2048),
            KnownModel("LlamaGen-3B class 384", "c2i_3B_384.pt", 384, 576, 1, 3_096_659_200, 2 * 24 * 3200),
            KnownModel("LlamaGen-7B class 384", "", 384, 576, 1, 6_614_589_440, 2 * 32 * 4096),
            KnownModel("LlamaGen-XL text 256", "t2i_XL_stage1_256.pt", 256, 256, 120, 777_923_840, 2 * 36 * 1280,
                load=_TEXT),
            KnownModel("LlamaGen-XL text 512", "t2i_XL_stage2_512.pt", 512, 1024, 120, 777_923_840, 2 * 36 * 1280,
                load=_TEXT),
        ),
    ),
    Family(
        "LlamaGen of clips", RASTER_TREE_ORDER, ("VideoPipeline",),
        plain="autoregressive", fast="speculative-jacobi:initial_draft=panned_frame",
    ),
    Family(
        "NAR, FlashAR, PAR", (OWN_ORDER,), (*_PICTURES, "VideoPipeline"),
        ("next_token.llamagen_near_to_far:LlamaGenNearToFar", "next_token.llamagen_regions:LlamaGenRegions"),
        samplers=("OrderedSampler",), plain="ordered", load="ClassImagePipeline.from_official",
        sizes=(  # PAR's learned tokens count with the prefix
            KnownModel("NAR-B class 256", "chenfeng1271/NAR-imagenet-256-B", 256, 256, 1, 130_551_552, 2 * 13 * 768),
            KnownModel("NAR-M class 256", "yefly/NAR-imagenet-256-M", 256, 256, 1, 295_453_696, 2 * 19 * 1024),
            KnownModel("NAR-L class 256", "chenfeng1271/NAR-imagenet-256-L", 256, 256, 1, 372_536_320, 2 * 25 * 1024),
            KnownModel("NAR-XL class 256", "yefly/NAR-imagenet-256-XL", 256, 256, 1, 815_991_040, 2 * 37 * 1280),
            KnownModel("NAR-XXL class 256", "chenfeng1271/NAR-imagenet-256-XXL", 256, 256, 1, 1_464_454_656,
                2 * 49 * 1536),
            KnownModel("NAR-XL text 256", "yefly/NAR-XL-t2i-stage1", 256, 256, 120, 819_215_360, 2 * 37 * 1280,
                load=_TEXT),
            KnownModel("NAR-XL text 512", "yefly/NAR-XL-t2i-stage2", 512, 1024, 120, 819_215_360, 2 * 37 * 1280,
                load=_TEXT),
            KnownModel("PAR-XL-4x class 384", "PAR-XL-4x.pt", 384, 576, 1 + 3, 774_703_360, 2 * 36 * 1280),
            KnownModel("PAR-XXL-4x class 384", "PAR-XXL-4x.pt", 384, 576, 1 + 3, 1_410_977_280, 2 * 48 * 1536),
            KnownModel("PAR-3B-4x class 384", "PAR-3B-4x.pt", 384, 576, 1 + 3, 3_096_668_800, 2 * 24 * 3200),
            KnownModel("PAR-3B-16x class 384", "PAR-3B-16x.pt", 384, 576, 1 + 15, 3_096_707_200, 2 * 24 * 3200),
        ),
    ),
    Family(
        "Token-Shuffle", (OWN_ORDER, BLOCKS), _PICTURES, ("next_token.llamagen_shuffle:LlamaGenShuffle",),
        saved={"transformer": "LlamaGenShuffle"}, samplers=("OrderedSampler", "BlockJacobiSampler"),
        plain="ordered", fast="block-jacobi",
    ),
    Family(
        "RandAR, ARPG, LPD", (ANY_ORDER,), (*_PICTURES, "VideoPipeline"),
        ("next_token.llamagen_any_order:LlamaGenAnyOrder", "next_token.llamagen_queries:LlamaGenQueries",
            "next_token.arpg:ARPGTransformer", "next_token.lpd:LPDTransformer"),
        samplers=tuple(entry.class_name for entry in SAMPLERS if entry.calls == ANY_ORDER),
        plain=AsSaved("any-order", ("order", "guidance_start"), whole=False),
        fast=AsSaved("speculative-any-order", ("order", "guidance_start"), {"num_drafts": 15}),
        load="ClassImagePipeline.from_official",
        layout=FileLayout((_ARPG, _LPD, replace(VQ, own=False)), size="image_size", tokenizer=_NEEDS_VQ),
        sizes=(  # RandAR's cache holds a slot's instruction beside its token, ARPG's half of the layers and one more
            KnownModel("RandAR-L class 256", "randar_0.3b_llamagen_360k_bs_1024_lr_0.0004.safetensors", 256, 256, 1,
                342_912_000, 2 * 2 * 24 * 1024),
            KnownModel("RandAR-XL class 256", "randar_0.7b_llamagen_360k_bs_1024_lr_0.0004.safetensors", 256, 256, 1,
                774_700_800, 2 * 2 * 36 * 1280),
            KnownModel("RandAR-XXL class 256", "", 256, 256, 1, 1_410_974_208, 2 * 2 * 48 * 1536),
            KnownModel("ARPG-L class 256", "arpg_300m.pt", 256, 256, 1, 319_845_376, 2 * 13 * 1024),
            KnownModel("ARPG-XL class 256", "arpg_700m.pt", 256, 256, 1, 718_997_760, 2 * 19 * 1280),
            KnownModel("ARPG-XXL class 256", "arpg_1b.pt", 256, 256, 1, 1_302_449_664, 2 * 25 * 1536),
            KnownModel("LPD-L class 256", "lpd_l_256.pth", 256, 256, 1, 337_157_120, 2 * 24 * 1024),
            KnownModel("LPD-XL class 256", "lpd_xl_256.pth", 256, 256, 1, 751_947_520, 2 * 36 * 1280),
            KnownModel("LPD-XXL class 256", "lpd_xxl_256.pth", 256, 256, 1, 1_412_184_576, 2 * 48 * 1536),
            KnownModel("LPD-L class 512", "lpd_l_512.pth", 512, 1024, 1, 337_943_552, 2 * 24 * 1024),
            KnownModel("LPD-XL class 512", "lpd_xl_512.pth", 512, 1024, 1, 752_930_560, 2 * 36 * 1280),
        ),
    ),
    Family(
        "VAR", (SCALES,), ("ScaleImagePipeline",),
        ("next_scale.var:VARTransformer", "next_scale.var_vq:MultiscaleVQModel"),
        unit="scales", plain="scale-wise", measured="eval.defaults:scale_settings", refiners=("VARTransformer",),
        load="ScaleImagePipeline.from_official",
        layout=FileLayout((VAR, VAR_VQ), second="refiner", tokenizer=_NEEDS_VAR_VQ),
        sizes=(
            KnownModel("VAR-d16 class 256", "var_d16.pth", 256, 680, 0, 310_283_520, 2 * 16 * 1024, 16 * 16),
            KnownModel("VAR-d20 class 256", "var_d20.pth", 256, 680, 0, 600_917_136, 2 * 20 * 1280, 16 * 16),
            KnownModel("VAR-d24 class 256", "var_d24.pth", 256, 680, 0, 1_033_399_360, 2 * 24 * 1536, 16 * 16),
            KnownModel("VAR-d30 class 256", "var_d30.pth", 256, 680, 0, 2_010_020_356, 2 * 30 * 1920, 16 * 16),
            KnownModel("VAR-d36 class 512", "var_d36.pth", 512, 2240, 0, 2_353_893_904, 2 * 36 * 2304, 32 * 32),
        ),
    ),
    Family(
        "FlexVAR, SAR", (SCALES,), ("ScaleImagePipeline",),
        ("next_scale.flexvar:FlexVARTransformer", "next_scale.flexvar:FlexVQModel"),
        saved={"transformer": "FlexVARTransformer"}, unit="scales", plain="scale-wise",
        refiners=("FlexVARTransformer",),
        measured=(Measured("scale-wise", {"scales": [
            (1, 2, 3, 5, 7, 10, 13, 16), (1, 2, 4, 6, 10, 16), (1, 2, 4, 8, 16), (1, 4, 8, 16)]}),),
        load="ScaleImagePipeline.from_official",
        layout=FileLayout((_FLEXVAR, _FLEXVAE), second="refiner", tokenizer="FlexVAE.pth"),
        sizes=(
            KnownModel("FlexVAR-d16, SAR-d16 class 256", "FlexVARd16-epo179.pth", 256, 680, 0, 315_561_936,
                2 * 16 * 1024, 16 * 16),
            KnownModel("FlexVAR-d20, SAR-d20 class 256", "FlexVARd20-epo249.pth", 256, 680, 0, 607_513_952,
                2 * 20 * 1280, 16 * 16),
            KnownModel("FlexVAR-d24, SAR-d24 class 256", "FlexVARd24-epo349.pth", 256, 680, 0, 1_041_314_576,
                2 * 24 * 1536, 16 * 16),
        ),
    ),
    # Sizes of transformers' default configurations, which match the released weights.
    Family(
        "Chameleon, Anole", RASTER_TREE_ORDER, load=_ACCELERATE, verified="transformers",
        of_transformers={"ChameleonForConditionalGeneration": "next_token.chameleon:ChameleonImageModel"},
        sizes=(
            KnownModel("Chameleon-7B, Anole-7B", "leloy/Anole-7b-v0.1-hf", 512, 1024, 64, 7_013_666_816, 2 * 32 * 4096),
        ),
    ),
    Family(
        "Lumina-mGPT", RASTER_TREE_ORDER, load=_ACCELERATE, verified="transformers",
        sizes=(
            KnownModel("Lumina-mGPT-7B 768", "Alpha-VLLM/Lumina-mGPT-7B-768", 768, 48 * 49, 64, 7_013_666_816,
                2 * 32 * 4096),
        ),
    ),
    Family(
        "Emu3", RASTER_TREE_ORDER, load=_ACCELERATE, verified="transformers",
        of_transformers={"Emu3ForConditionalGeneration": "next_token.emu3:Emu3ImageModel"},
        sizes=(KnownModel("Emu3-Gen", "BAAI/Emu3-Gen-hf", 720, 90 * 91, 64, 8_492_011_520, 2 * 32 * 1024),),
    ),
    Family(
        "GLM-Image", RASTER_TREE_ORDER, load=_ACCELERATE, verified="transformers",
        of_transformers={"GlmImageForConditionalGeneration": "next_token.glm_image:GlmImageStage"},
        sizes=(
            KnownModel("GLM-Image, its token stage", "zai-org/GLM-Image", 1024, 32 * 32 + 16 * 16, 64, 8_914_788_352,
                2 * 40 * 256),
        ),
    ),
    Family(
        "MammothModa2", RASTER_TREE_ORDER, load="MammothModa2.from_pretrained, visual_spec.accelerate(model)",
        of_transformers={"MammothModa2": "next_token.mammoth:MammothModa2Stage"},
    ),
    # Without what reads pictures.
    Family("Janus, Janus-Pro", RASTER_TREE_ORDER, load=_ACCELERATE, verified="transformers",
        of_transformers={"JanusForConditionalGeneration": "next_token.janus:JanusImageModel"},
        sizes=(
            KnownModel("Janus-Pro-1B", "deepseek-community/Janus-Pro-1B", 384, 576, 64, 1_694_769_152, 2 * 24 * 2048),
            KnownModel("Janus-Pro-7B", "deepseek-community/Janus-Pro-7B", 384, 576, 64, 7_011_221_504, 2 * 30 * 4096),
        ),
    ),
    Family(
        "MusicGen", (COLUMNS,), ("AudioPipeline",), unit="columns", plain="columns", verified="transformers",
        load="AudioPipeline.from_musicgen, visual_spec.accelerate(model)",
        sizes=(  # the prefix: the empty step, and the words
            KnownModel("MusicGen-small 30 s", "facebook/musicgen-small", 0, 1503, 21, 420_371_456, 2 * 24 * 1024),
            KnownModel("MusicGen-medium 30 s", "facebook/musicgen-medium", 0, 1503, 21, 1_838_737_920, 2 * 48 * 1536),
            KnownModel("MusicGen-large 30 s", "facebook/musicgen-large", 0, 1503, 21, 3_256_956_928, 2 * 48 * 2048),
            KnownModel("MusicGen-small stereo 30 s", "facebook/musicgen-stereo-small", 0, 1503, 21, 437_152_768,
                2 * 24 * 1024),
            KnownModel("MusicGen-medium stereo 30 s", "facebook/musicgen-stereo-medium", 0, 1503, 21, 1_863_909_888,
                2 * 48 * 1536),
            KnownModel("MusicGen-large stereo 30 s", "facebook/musicgen-stereo-large", 0, 1503, 21, 3_290_519_552,
                2 * 48 * 2048),
        ),
    ),
    # Models that answer no calls of ours, see `ACCELERATED`. The prefix: a text of 64 ids, where it reads one.
    Family(
        "CSM, Moshi, Qwen3-Omni", (), load=_ACCELERATE, verified="transformers",
        sizes=(
            KnownModel("CSM-1B 30 s", "sesame/csm-1b", 0, 375, 64, 1_552_791_552, 2 * 16 * 512, rows=1),
            KnownModel("Moshiko, Moshika 30 s", "kmhf/hf-moshiko, kmhf/hf-moshika", 0, 375, 1, 7_687_729_152,
                2 * 32 * 4096, rows=1),
            KnownModel("Qwen3-Omni-30B, talker 30 s", "Qwen/Qwen3-Omni-30B-A3B-Instruct", 0, 375, 64, 3_324_596_480,
                2 * 20 * 256, rows=1),
        ),
    ),
    Family(
        "VibeVoice, PocketTTS", (), load=_ACCELERATE, verified="own code",
        sizes=(
            KnownModel("VibeVoice-1.5B 30 s", "vibevoice/VibeVoice-1.5B-hf", 0, 225, 64, 1_672_016_386, 2 * 28 * 256),
            KnownModel("VibeVoice-7B (Large) 30 s", "vibevoice/VibeVoice-7B", 0, 225, 64, 8_311_349_762, 2 * 28 * 512),
            KnownModel("PocketTTS 30 s", "eustlb/pocket-tts", 0, 375, 64, 89_451_778, 2 * 6 * 1024, rows=1),
            KnownModel("PocketTTS 24 layers 30 s", "kyutai/pocket-tts, languages/*_24l", 0, 375, 64, 316_017_922,
                2 * 24 * 1024, rows=1),
        ),
    ),
    Family(
        "MiniMax-Music 3", (), load=_ACCELERATE, verified="own code",
        sizes=(
            KnownModel("MiniMax-Music 3 30 s", "MiniMaxAI/MiniMax-Music3", 0, 750, 64, 9_230_500_864, 2 * 36 * 1024),
        ),
    ),
    Family(
        "NextStep", (), load=_ACCELERATE, verified="own code",
        sizes=(
            KnownModel("NextStep-1, NextStep-1.1 512", "stepfun-ai/NextStep-1-Large, stepfun-ai/NextStep-1.1", 512,
                1024, 64, 14_953_814_080, 2 * 48 * 1024),
        ),
    ),
    # Masked models hold no cache: every call scores the whole picture or clip again. One of pictures decodes fast as it
    # was saved, several tokens a call. Its plain decoding is one token a call in a fixed order: the law of the model
    # alone, which the number of calls does not change.
    Family(
        "MaskGIT", (MASKED,), ("MaskedImagePipeline", "MaskedClassImagePipeline"),
        ("masked.maskgit:MaskedImageTransformer",),
        plain="speculative-masked:num_drafts=0", fast=AsSaved("masked"), measured=_MASKED_PICTURES,
        load="MaskedClassImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "Halton-MaskGIT", ("cls_emb.weight", "tok_emb.weight", "pos_emb.weight"),
                "masked.maskgit_checkpoint:load_maskgit_checkpoint", pipeline="MaskedClassImagePipeline"),
            replace(VQ, own=False),
        ), size="image_size", tokenizer=_NEEDS_VQ),
        sizes=(
            KnownModel("MaskGIT-T class 256", "ImageNet_256_tiny.pth", 256, 256, 0, 23_031_425, 0),
            KnownModel("MaskGIT-S class 256", "ImageNet_256_small.pth", 256, 256, 0, 69_344_769, 0),
            KnownModel("MaskGIT-S class 384", "ImageNet_384_small.pth", 384, 576, 0, 69_508_609, 0),
            KnownModel("MaskGIT-B class 256", "ImageNet_256_base.pth", 256, 256, 0, 142_224_641, 0),
            KnownModel("MaskGIT-B class 384", "ImageNet_384_base.pth", 384, 576, 0, 142_470_401, 0),
            KnownModel("MaskGIT-L class 384", "ImageNet_384_large.pth", 384, 576, 0, 479_984_641, 0),
        ),
    ),
    Family(
        "MAGE", (MASKED,), ("MageImagePipeline",), ("masked.mage:MageTransformer", "masked.mage_vq:MageVQModel"),
        plain="speculative-masked:num_drafts=0", fast=AsSaved("masked"), measured=_MASKED_PICTURES,
        load="MageImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "MAGE", ("token_emb.word_embeddings.weight",),
                "masked.mage:load_mage_checkpoint", pipeline="MageImagePipeline",
                holds="masked.mage_vq:is_mage_tokenizer"),
            OfficialFile("vq_model", "MAGE's tokenizer", "masked.mage_vq:is_mage_tokenizer",
                "masked.mage_vq:load_mage_tokenizer", "image_size"),
        ), tokenizer="vqgan_jax_strongaug.ckpt"),
        sizes=(
            KnownModel("MAGE-B 256", "mage-vitb-1600.pth", 256, 256, 0, 144_896_745, 0),
            KnownModel("MAGE-L 256", "mage-vitl-1600.pth", 256, 256, 0, 407_788_521, 0),
        ),
    ),
    Family(
        "aMUSEd", (MASKED,), ("AmusedImagePipeline",),
        ("masked.amused:AmusedTransformer", "masked.amused:AmusedVQModel"),
        plain="speculative-masked:num_drafts=0", fast=AsSaved("masked"), measured=_MASKED_PICTURES,
        of_diffusers="AmusedPipeline",
    ),
    Family(
        "Lumina-DiMOO", (MASKED,), ("DimooImagePipeline",),
        ("masked.dimoo:DimooTransformer", "text.prompt_embeddings:PromptEmbeddings"),
        plain="speculative-masked:num_drafts=0", fast=AsSaved("masked"), measured=_MASKED_PICTURES,
        load="DimooImagePipeline.from_official", of_diffusers="LuminaDiMOOPipeline",
        layout=FileLayout(assemble="pipelines.dimoo_image:assemble",
            recognise="models.masked.dimoo_checkpoint:is_dimoo"),
        # Without the rows of words, of which the text encoder holds those of the table.
        sizes=(KnownModel("Lumina-DiMOO 1024", "Alpha-VLLM/Lumina-DiMOO", 1024, 4096, 0, 7_046_778_880, 0),),
    ),
    Family(
        "MAGNeT", (MASKED,), ("AudioPipeline",), saved={"masked": True}, unit="columns",
        plain=AsSaved("masked"), fast="masked", comparable=False,
        measured="eval.defaults:masked_settings", load="AudioPipeline.from_magnet",
        sizes=(
            KnownModel("MAGNeT-small 10 s", "facebook/magnet-small-10secs", 0, 500, 0, 420_371_456, 0),
            KnownModel("MAGNeT-small 30 s", "facebook/magnet-small-30secs", 0, 1500, 0, 420_371_456, 0),
            KnownModel("MAGNeT-medium 10 s", "facebook/magnet-medium-10secs", 0, 500, 0, 1_838_737_920, 0),
            KnownModel("MAGNeT-medium 30 s", "facebook/magnet-medium-30secs", 0, 1500, 0, 1_838_737_920, 0),
        ),
    ),
    Family(
        "MaskGCT", (MASKED,), ("MaskgctPipeline",),
        ("masked.maskgct:SemanticNetwork", "masked.maskgct:AcousticNetwork", "masked.maskgct_codec:SemanticCodec",
         "masked.maskgct_codec:AcousticCodec"),
        unit="columns", plain=AsSaved("masked"), comparable=False, measured="eval.defaults:masked_settings",
        load="MaskgctPipeline.from_official",
        layout=FileLayout(assemble="pipelines.convert_maskgct:assemble",
            recognise="pipelines.convert_maskgct:is_of_maskgct"),
        sizes=(KnownModel("MaskGCT 10 s", "amphion/MaskGCT", 0, 500, 300, 1_430_188_032, 0),),  # both stages
    ),
    Family(
        "frame-masked", (FRAMES,), ("VideoPipeline",), ("masked.frames:FrameMaskedTransformer",),
        saved={"transformer": "FrameMaskedTransformer"}, plain=AsSaved("frame-masked"), comparable=False,
    ),
    Family(
        "Self-Forcing", (CHUNKS,), ("ChunkVideoPipeline",), unit="chunks", plain=AsSaved("chunk-wise"),
        comparable=False, stored_as="canvas", measured="",
        layout=FileLayout(assemble="pipelines.convert:assemble_wan", recognise="pipelines.convert:is_of_wan"),
    ),
    Family(
        "MAR", (CONTINUOUS,), ("ContinuousImagePipeline",),
        ("continuous.mar:MARTransformer", "continuous.causal:CausalContinuousTransformer"), stored_as="canvas",
        plain="continuous", shorter="continuous:head_steps=25", measured="eval.defaults:continuous_settings",
        load="ContinuousImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "MAR", "continuous.mar_checkpoint:is_mar",
                "continuous.mar_checkpoint:load_mar_checkpoint", unpack="continuous.mar_checkpoint:unpack_mar",
                pipeline="ContinuousImagePipeline"),
            KL16,
        ), second="drafter", tokenizer="kl16.ckpt"),
        sizes=(  # the prefix: places that hold the class
            KnownModel("MAR-B class 256", "checkpoint-last.pth", 256, 256, 64, 207_924_768, 0,
                published=("continuous", 2.9)),
            KnownModel("MAR-L class 256", "checkpoint-last.pth", 256, 256, 64, 478_326_304, 0,
                published=("continuous", 3.0)),
            KnownModel("MAR-H class 256", "checkpoint-last.pth", 256, 256, 64, 942_403_104, 0,
                published=("continuous", 3.2)),
        ),
    ),
    Family(
        "BitDance", (CONTINUOUS,), ("ContinuousImagePipeline",),
        ("continuous.bitdance:BitDanceTransformer", "continuous.binary_autoencoder:BinaryAutoencoder"),
        saved={"transformer": "BitDanceTransformer"}, stored_as="canvas", unit="patches",
        plain="continuous", shorter="continuous:head_steps=26",
        measured=(Measured("continuous", {"head_steps": [101, 51, 26, 11]}),
            Measured("continuous", {"head_steps": [101], "last_head_steps": [11]})),
        load="ContinuousImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "continuous.bitdance:name_of", "continuous.bitdance:is_bitdance",
                "continuous.bitdance:load_bitdance", unpack="continuous.bitdance:unpack_bitdance",
                pipeline="ContinuousImagePipeline"),
            OfficialFile("vae", "BitDance's tokenizer", ("decoder.adaptive.0.gamma.weight",),
                "continuous.binary_autoencoder:load_binary_autoencoder"),
        ), second="drafter", tokenizer="ae_d16c32.pt"),
        sizes=(  # the prefix: places that hold the class, and the queries
            KnownModel("BitDance-B-1x class 256", "BitDance_B_1x.pt", 256, 256, 64, 242_373_152, 2 * 24 * 768,
                published=("continuous", 3.2)),
            KnownModel("BitDance-B-4x class 256", "BitDance_B_4x.pt", 256, 256, 64 + 3, 260_102_432, 2 * 24 * 768,
                published=("continuous", 3.9)),
            KnownModel("BitDance-B-16x class 256", "BitDance_B_16x.pt", 256, 256, 64 + 15, 260_111_648, 2 * 24 * 768,
                published=("continuous", 6.1)),
            KnownModel("BitDance-L-1x class 256", "BitDance_L_1x.pt", 256, 256, 64, 527_271_968, 2 * 32 * 1024,
                published=("continuous", 4.0)),
            KnownModel("BitDance-H-1x class 256", "BitDance_H_1x.pt", 256, 256, 64, 1_007_960_352, 2 * 40 * 1280,
                published=("continuous", 4.55)),
        ),
    ),
    Family(
        "BitDance of texts", (CONTINUOUS,), ("BitDanceImagePipeline",),
        ("continuous.bitdance_text:BitDanceTextTransformer",), stored_as="canvas", unit="patches",
        plain=AsSaved("continuous", ("guidance",), whole=False), shorter="continuous:guidance=constant,head_steps=26",
        measured=(Measured("continuous", {"guidance": ["constant"], "head_steps": [51, 26, 11]}),),
        load="BitDanceImagePipeline.from_official",
        layout=FileLayout(assemble="pipelines.convert:assemble_bitdance", recognise="pipelines.convert:is_of_bitdance"),
        sizes=(  # as the training configurations make them; a prompt of 64 ids, and those of the picture
            KnownModel("BitDance-14B-64x text 1024", "shallowdream204/BitDance-14B-64x", 1024, 4096, 64 + 66,
                15_775_513_632, 2 * 40 * 1024),
            KnownModel("BitDance-14B-16x text 1024", "shallowdream204/BitDance-14B-16x", 1024, 4096, 64 + 18,
                15_775_267_872, 2 * 40 * 1024),
        ),
    ),
    # The last family with a layout: its tokenizer's keys fit any VQGAN.
    Family(
        "Infinity", (SCALES,), ("InfinityPipeline",),
        ("next_scale.infinity:InfinityTransformer", "next_scale.infinity_vq:BitwiseVQModel"), unit="scales",
        plain=AsSaved("scale-wise"), fast="scale-wise", comparable=False, measured="",
        load="InfinityPipeline.from_official",
        stored_as="canvas",  # its ids are bits, which only the decoding adds up
        layout=FileLayout((
            OfficialFile("transformer", "Infinity", ("cfg_uncond",),
                "next_scale.infinity_checkpoint:load_infinity_checkpoint", "scales",
                "next_scale.infinity_scales:scales_by_name", "InfinityPipeline", folder=True),
            OfficialFile("vq_model", "Infinity's tokenizer", ("encoder.down.0.*",),
                "next_scale.infinity_vq:load_infinity_vq_checkpoint", "scales",
                "next_scale.infinity_scales:scales_of_size"),
        ), size="size", tokenizer="infinity_vae_d32reg.pth"),
        sizes=(
            KnownModel("Infinity-2B", "infinity_2b_reg.pth", 1024, 10521, 0, 2_204_564_032, 2 * 32 * 2048, 64 * 64),
            KnownModel("Infinity-8B", "infinity_8b_weights", 1024, 10521, 0, 8_375_791_824, 2 * 40 * 3584, 64 * 64),
            KnownModel("Infinity-8B 512", "infinity_8b_512x512_weights", 512, 2521, 0, 8_375_791_824, 2 * 40 * 3584,
                32 * 32),
        ),
    ),
)
# fmt: on

VERIFIED = {
    "embedded": "trained here; tests pin its tokens and pictures, and how often it draws what a prompt says",
    "official layout": "keys and shapes of the official layout, logits equal to a straight-line computation; the "
    "released weights themselves were not run",
    "transformers": "tiny random configurations equal transformers' own generate token for token; the released "
    "weights themselves were not run",
    "own code": "tiny random configurations give, up to rounding, what transformers, diffusers or the release's own "
    "code gives; the released weights themselves were not run",
}

# What `visual_spec.accelerate(model)` does for models of other libraries that are of no family: fewer or cheaper calls.
ACCELERATED = {
    "CSM, Moshi, Qwen3-Omni": "a frame's codes in a static cache, or several a call by depth-window; the same codes",
    "Qwen3-TTS": "a frame's codes in a static cache, or several a call by depth-window; the same codes",
    "MiniMax-Music 3": "a frame's codes in a static cache, or several a call by depth-window; the same codes",
    "VibeVoice, PocketTTS": "fewer calls of the diffusion head; the same latents",
    "NextStep": "the head's modulations once a token; the same tokens",
    "Wan": "made causal, with a cache of frames and its policy; its own law",
    "Qwen2.5-Omni, Chatterbox, ACE-Step 1.5": "Jacobi decoding in place of their own loops; the same codes",
    "CosyVoice 2 and 3": "Jacobi decoding in place of its own loop; the same law",
    "language models of codes": "accelerate(model, codes=(first, last + 1)): Jacobi decoding; the same ids",
}

# Memory in addition to `KnownModel.parameters`.
EXTRAS = {
    "VQ-16 tokenizer": 71_883_403,
    "VQ-8 tokenizer": 70_109_835,
    "VAR tokenizer": 108_948_355,
    "KL-16 tokenizer": 66_456_019,
    "BitDance tokenizer": 460_294_179,
    "flan-t5-xl encoder": 1_223_527_424,
    "t5-base encoder": 109_628_544,
    "MAGE tokenizer": 54_515_587,
    "MaskGCT codecs": 192_909_258,
    "Mimi codec": 96_151_393,
    "VibeVoice codecs": 1_032_005_601,
    "PocketTTS codec": 20_054_337,
    "MiniMax-Music 3's flow and vocoder": 2_511_244_523,
}


@functools.cache
def all_families() -> tuple[Family, ...]:
    """The families of this table, then those that packages register at the entry point `visual_spec.families`."""
    return (*FAMILIES, *(one for one in registered("visual_spec.families") if isinstance(one, Family)))


@functools.cache
def all_pipelines() -> dict[str, PipelineEntry]:
    """The pipelines of this table by their classes, and those that are registered among the families."""
    others = (one for one in registered("visual_spec.families") if isinstance(one, PipelineEntry))
    return {entry.class_name: entry for entry in others} | PIPELINES


def models() -> list[KnownModel]:
    """Return all official sizes, with what the family says of them."""
    return [
        replace(size, load=size.load or family.load, verified=family.verified, calls=family.calls)
        for family in all_families()
        for size in family.sizes
    ]


def image_models() -> dict[str, str]:
    """Return what draws with each image generator of transformers: {its class: "module:class"}."""
    return {
        name: f"{family.home}.{path}" for family in FAMILIES for name, path in family.of_transformers.items()
    }


@functools.cache
def component_homes() -> dict[str, str]:
    """Return the modules of all classes that a saved folder may name: {class: module}."""
    homes: dict[str, str] = {}
    for family in all_families():
        for module, _, name in (part.partition(":") for part in family.parts):
            homes[name] = f"{family.home}.{module}"
    for entry in all_samplers():
        homes |= {
            name: module for module, _, name in (path.partition(":") for path in (entry.path, *entry.parts))
        }
    return homes


def family_of(pipeline: str, settings: Mapping[str, object], sampler: Mapping[str, object]) -> Family:
    """Return the family of a pipeline, loaded or saved.

    Args:
        pipeline: name of its class.
        settings: what its model_index.json says.
        sampler: the configuration of its sampler, as it is saved.

    Raises:
        ValueError: no family names this class; the message lists those that are named.
    """
    fitting_ones = [family for family in all_families() if family.fits(pipeline, settings, sampler)]
    if not fitting_ones:
        raise ValueError(f"{pipeline} is in no family; pass one of {', '.join(all_pipelines())}.")
    return max(fitting_ones, key=lambda family: (len(family.samplers) > 0, len(family.saved)))
