"""What this storey registers: its samplers, and its families with their pipelines. Plain data, without PyTorch."""

from __future__ import annotations

from dataclasses import replace

from visual_spec.families import GPT, KL16, VAR, VAR_VQ, VQ
from visual_spec.records import AsSaved, Family, FileLayout, KnownModel, Measured, OfficialFile, PipelineEntry
from visual_spec.samplers.registry import (
    COLUMNS,
    CONTINUOUS,
    DENOISED,
    DISTILLED,
    DRAFTER,
    FLOW_SCALES,
    MASKED,
    ORDER,
    RASTER,
    RASTER_TREE_ORDER,
    TREE,
    SamplerEntry,
)

_HERE = "visual_spec.prototype"

SAMPLERS = (
    SamplerEntry(
        "proactive-jacobi", f"{_HERE}.proactive:ProactiveJacobiSampler", TREE, "lossless", settings=()
    ),
    SamplerEntry(
        "block-drafts",
        f"{_HERE}.block_drafts.sampler:BlockDraftSampler",
        RASTER,
        "identical or lossless",
        DRAFTER,
        settings=(),
        asks="a model whose hidden states its calls return",
        parts=(f"{_HERE}.block_drafts.drafter:BlockDrafter",),
    ),
    SamplerEntry(
        "multiscale",
        f"{_HERE}.local_speculation.sampler:MultiscaleSampler",
        RASTER,
        "measured (the drafter is of lower resolution)",
        DRAFTER,
        settings=(),
        parts=(f"{_HERE}.local_speculation.drafter:MultiscaleDrafter",),
    ),
    SamplerEntry(
        "parallel-jacobi", f"{_HERE}.parallel_jacobi:ParallelJacobiSampler", ORDER, "measured", settings=()
    ),
    SamplerEntry(
        "drafted-columns",
        f"{_HERE}.drafted_columns.sampler:DraftedColumnSampler",
        COLUMNS,
        "identical or lossless",
        DRAFTER,
        settings=("", "acceptance=identical"),
        parts=(f"{_HERE}.drafted_columns.eagle:ColumnEagleDrafter",),
    ),
    SamplerEntry(
        "self-speculative-masked",
        f"{_HERE}.self_speculative.sampler:SelfSpeculativeMaskedSampler",
        MASKED,
        "the law of a causal layer, by groups",
        settings=(),
        asks="one codebook and a causal layer",
        parts=(f"{_HERE}.self_speculative.causal_layer:CausalLayer",),
    ),
    SamplerEntry(
        "freedave",
        f"{_HERE}.freedave:FreeDaveSampler",
        MASKED,
        "identical, to masked decoding with the same settings",
        settings=(),
        asks="one codebook",
    ),
    SamplerEntry(
        "reusing-masked",
        f"{_HERE}.reuse.masked:ReusingMaskedSampler",
        MASKED,
        "a law of its own, some calls from what an earlier one computed (ReCAP, a shortcut, logits)",
        settings=(),
        parts=(
            f"{_HERE}.reuse.shortcut:FeatureShortcut",
            f"{_HERE}.reuse.dimoo_shortcut:DimooShortcut",
        ),
    ),
    SamplerEntry(
        "reusing-continuous",
        f"{_HERE}.reuse.continuous:ReusingContinuousSampler",
        CONTINUOUS,
        "another law: some calls from what an earlier one computed (ReCAP)",
        settings=(),
        asks="a MAR",
    ),
    SamplerEntry(
        "flow-scales",
        f"{_HERE}.flowar.sampler:FlowScaleSampler",
        FLOW_SCALES,
        "a law of its own, map by map",
        plain=True,
    ),
    SamplerEntry(
        "block-diffusion",
        f"{_HERE}.acdit.sampler:BlockDiffusionSampler",
        DENOISED,
        "a law of its own, block by block",
        plain=True,
        settings=("levels=10", "levels=5"),
    ),
    SamplerEntry(
        "distilled",
        f"{_HERE}.students.sampler:DistilledSampler",
        DISTILLED,
        "the student's own law",
        plain=True,
        settings=("steps=1", "steps=2"),
    ),
)

# fmt: off
FAMILIES = (
    PipelineEntry("students.image_pipelines:DistilledImagePipeline", "image", "label", "unconditional-image-generation",
        _HERE),
    PipelineEntry("students.image_pipelines:DistilledTextImagePipeline", "image", "text", "text-to-image",
        _HERE),
    PipelineEntry("students.scale_pipeline:DistilledScalePipeline", "image", "label", "unconditional-image-generation",
        _HERE),
    Family(
        "ControlAR", RASTER_TREE_ORDER, ("ImagePipeline",), ("controlar:ControlARTransformer",),
        saved={"transformer": "ControlARTransformer"}, plain="autoregressive", fast="speculative-jacobi",
        load="ImagePipeline.from_official", home=_HERE,
        layout=FileLayout((
            OfficialFile("transformer", "ControlAR", "controlar:is_controlar",
                "controlar:load_controlar_checkpoint", "image_size", pipeline="ImagePipeline", home=_HERE),
            replace(VQ, own=False),
        ), size="image_size", tokenizer="vq_ds16_t2i.pt"),
        sizes=(
            KnownModel("ControlAR text 512", "edge_base.safetensors, depth_base.safetensors", 512, 1024, 120,
                881_543_680, 2 * 36 * 1280),
        ),
    ),
    Family(
        "DD1 student", (DISTILLED,), ("DistilledImagePipeline",),
        ("students.llamagen:LlamaGenStudent",),
        plain="distilled", comparable=False, stored_as="canvas", home=_HERE, measured="",
        load="DistilledImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "LlamaGen's student", "students.llamagen:is_llamagen_student",
                "students.llamagen:load_llamagen_student",
                unpack="students.llamagen:unpack_student", pipeline="DistilledImagePipeline", home=_HERE),
            replace(GPT, role="teacher", own=False), replace(VQ, own=False),
        ), tokenizer="vq_ds16_c2i.pt"),
        sizes=(
            # a call reads the whole picture
            KnownModel("DD1 student B class 256", "llamagen-B.pt", 256, 256, 1, 98_321_672, 0),
            KnownModel("DD1 student L class 256", "llamagen-L.pt", 256, 256, 1, 326_155_272, 0),
        ),
    ),
    Family(
        "DD1 student of captions", (DISTILLED,), ("DistilledTextImagePipeline",),
        plain="distilled", comparable=False, stored_as="canvas", home=_HERE,
        measured=(Measured("distilled", {"steps": [2]}),
            Measured("distilled", {"steps": [2], "teacher_from": [0]}, "teacher")),
    ),
    Family(
        "DD1 student of VAR", (DISTILLED,), ("DistilledScalePipeline",),
        ("students.var:VARStudent",),
        plain="distilled", comparable=False, stored_as="canvas", home=_HERE, measured="",
        load="DistilledScalePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "VAR's student",
                ("n_d_embed.weight", "layerwise_n_d_embed.0.weight", "pos_1LC"),
                "students.var:load_var_student", pipeline="DistilledScalePipeline", home=_HERE),
            replace(VAR, role="teacher", own=False), replace(VAR_VQ, own=False),
        ), tokenizer="vae_ch160v4096z32.pth"),
        sizes=(
            KnownModel("DD1 student VAR-d16 class 256", "var-d16.pth", 256, 680, 1, 328_165_664, 0),
            KnownModel("DD1 student VAR-d20 class 256", "var-d20.pth", 256, 680, 1, 635_399_088, 0),
            KnownModel("DD1 student VAR-d24 class 256", "var-d24.pth", 256, 680, 1, 1_092_478_560, 0),
        ),
    ),
    Family(
        "FlowAR", (FLOW_SCALES,), ("ContinuousImagePipeline",), ("flowar.model:FlowARTransformer",),
        saved={"transformer": "FlowARTransformer"}, stored_as="canvas", home=_HERE,
        plain=AsSaved("flow-scales"), comparable=False,
        measured=(Measured("flow-scales", {"levels": [2, 4, 8, 25]}),
            Measured("flow-scales", {"levels": [25], "last_levels": [15]})),
        load="ContinuousImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "FlowAR", "flowar.model:is_flowar",
                "flowar.model:load_flowar_checkpoint", unpack="flowar.model:unpack_flowar",
                pipeline="ContinuousImagePipeline", home=_HERE),
            replace(KL16, own=False),
        ), tokenizer="kl16.ckpt"),
        sizes=(
            KnownModel("FlowAR-S class 256", "FlowAR-S.pth", 256, 341, 0, 171_718_072, 2 * 12 * 768, 16 * 16,
                published=("flow-scales", 4.3)),
            KnownModel("FlowAR-L class 256", "FlowAR-L.pth", 256, 341, 0, 586_862_912, 2 * 16 * 1024, 16 * 16,
                published=("flow-scales", 2.4)),
            KnownModel("FlowAR-H class 256", "FlowAR-H.pth", 256, 341, 0, 1_913_316_880, 2 * 30 * 1536, 16 * 16,
                published=("flow-scales:levels=50,guided_from=0.7", 2.4)),
        ),
    ),
    Family(
        "ACDiT", (DENOISED,), ("ContinuousImagePipeline",), ("acdit.model:ACDiTTransformer",),
        saved={"transformer": "ACDiTTransformer"}, stored_as="canvas", home=_HERE,
        plain=AsSaved("block-diffusion"), comparable=False,
        measured=(Measured("block-diffusion", {"levels": [50, 25, 10, 5]}),),
        load="ContinuousImagePipeline.from_official",
        layout=FileLayout((
            OfficialFile("transformer", "ACDiT", "acdit.checkpoint:is_acdit",
                "acdit.checkpoint:load_acdit_checkpoint", pipeline="ContinuousImagePipeline", home=_HERE),
            OfficialFile("vae", "a folder of AutoencoderKL", ("post_quant_conv.weight",),
                "continuous.mar_checkpoint:load_kl16_checkpoint", own=False, folder=True, lacks=("quantize*",)),
        ), tokenizer="the folder vae of facebook/DiT-XL-2-256"),
        sizes=(
            KnownModel("ACDiT-XL class 256", "ACDiT-XL-img.pt", 256, 1024, 0, 674_856_708, 2 * 28 * 1152,
                published=("block-diffusion", 1.5)),
            KnownModel("ACDiT-H class 256", "ACDiT-H-img.pt", 256, 1024, 0, 950_959_620, 2 * 32 * 1280,
                published=("block-diffusion", 1.5)),
        ),
    ),
)
# fmt: on
