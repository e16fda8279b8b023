"""Pictures of `shapes` through vLLM, by both of its model runners: tokens and calls of the pipeline."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import CPU, NEEDS_VLLM

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NEEDS_VLLM), reason=NEEDS_VLLM)]


def run(*command: str, fails: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | CPU | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return done.stderr if fails else done.stdout


@pytest.mark.parametrize("runner", ["first", "second"])
def test_pictures_are_those_of_the_pipeline(runner, tmp_path):
    """All pictures at once, with guidance, and a ragged finish; with a window and without."""
    out, more = tmp_path / "out.json", ["--second"] if runner == "second" else []
    count = 4 if runner == "first" else 2
    run("benchmarks/served_pictures.py", "--prompts", str(count), "--out", str(out), *more)
    facts: dict[str, Any] = json.loads(out.read_text())
    assert [facts[name]["equal pictures"] for name in ("pipeline", "window", "plain")] == [count] * 3
    # A call serves all pictures, so there are as many as the slowest picture takes. The second runner schedules ahead:
    # it may make one call more, for nothing.
    ahead = runner == "second"
    assert 0 <= facts["window"]["calls"] - facts["pipeline"]["most calls of a picture"] <= ahead
    assert 0 <= facts["plain"]["calls"] - 256 <= ahead and facts["window"]["calls"] < 128


REFUSED = """
import json, sys
from vllm import LLM
from visual_spec.pipelines.placing import load
from visual_spec.serving.vllm.engine import engine_arguments
from visual_spec.serving.vllm.folder import save_for_vllm
folder = save_for_vllm(load("shapes", "cpu", "float32"), sys.argv[1])
errors = []
for more in json.loads(sys.argv[2]):
    try:
        LLM(**engine_arguments(folder, requests=4, dtype="float32") | more)
    except Exception as error:
        errors.append(str(error))
print(json.dumps(errors))
"""


def test_settings_under_which_pictures_are_not_safe_are_refused_at_start(tmp_path):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    cases = {
        "enable_prefix_caching=True": {"enable_prefix_caching": True},
        "max_num_seqs=3": {"max_num_seqs": 3},
        "max_num_batched_tokens=342; 40 requests need 1280": {"max_num_seqs": 40},
        "method 'ngram' and model 'ngram'": {"speculative_config": ngram},
    }
    errors = json.loads(run("-c", REFUSED, str(tmp_path), json.dumps(list(cases.values()))).splitlines()[-1])
    for named, error in zip(cases, errors, strict=True):
        assert named in error
    (eager,) = json.loads(run("-c", REFUSED, str(tmp_path), '[{"enforce_eager": false}]').splitlines()[-1])
    assert "enforce_eager=False" in eager


OTHER_VERSION = """
import sys
import vllm
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
sys.modules["vllm.v1.worker.gpu.sample.logits_processor.interface"] = None  # a version that has none
from visual_spec.serving.vllm.law import PictureLaw
assert issubclass(PictureLaw, LogitsProcessor)
del sys.modules["vllm.v1.worker.gpu.sample.logits_processor.interface"]
import logging
from vllm.v1.worker.gpu import model_runner
from visual_spec.serving.vllm import start
from visual_spec.serving.vllm.plugin import register
said = []
logging.Logger.warning = lambda self, message, *values: said.append(message % values)
propose, usual = BaseSpeculator.propose, model_runner.init_speculator
BaseSpeculator.propose = lambda self, batch: None
assert start.missing() == ("input_batch of vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator.propose",)
register()
assert model_runner.init_speculator is usual and "serves nothing" in said[-1]
BaseSpeculator.propose = propose
start.missing.cache_clear()
vllm.__version__ = "0.99.0"
register()
assert model_runner.init_speculator is not usual and "vLLM 0.99.0" in said[-1] and "was not run" in said[-1]
start.INTERFACES += (("vllm.v1.nothing", "Nothing", ()),)
start.missing.cache_clear()
start.check_start(None, None)
"""


def test_a_version_counts_by_its_interfaces_and_what_it_lacks_is_named():
    assert "this vLLM has no vllm.v1.nothing.Nothing; visual_spec was run with 0.32.0" in run(
        "-c", OTHER_VERSION, fails=True
    )


OWN_NOISE = """
import sys
from tests.serving import interpreted
from transformers import LlamaConfig, LlamaForCausalLM
import json, torch, pathlib
folder, window = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=63))
model.lm_head.weight.data.mul_(4)
model.save_pretrained(folder)
config = json.loads((folder / "config.json").read_text())
config["architectures"] = ["OwnNoiseLlama"]
config["visual_spec"] = {"grid": [6, 6], "image_ids": [0, 60], "prompt_tokens": 8}
(folder / "config.json").write_text(json.dumps(config))
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.model_executor.models.llama import LlamaForCausalLM as Llama
from visual_spec.serving.vllm.engine import engine_arguments
from visual_spec.serving.vllm.start import windows_of
from visual_spec.serving.vllm.speculator import OwnNoiseState
class OwnNoiseLlama(Llama):
    @staticmethod
    def get_model_state_cls():
        return OwnNoiseState
ModelRegistry.register_model("OwnNoiseLlama", OwnNoiseLlama)
engine = LLM(**engine_arguments(folder, window=window, requests=4, second=True, dtype="float32"))
windows = windows_of(engine.llm_engine.vllm_config)
windows.calls = 0
settings = dict(temperature=1.5, max_tokens=36, ignore_eos=True, detokenize=False)
params = [SamplingParams(seed=seed, **settings) for seed in range(3)]
outputs = engine.generate([{"prompt_token_ids": [5] * (3 + k)} for k in range(3)], params, use_tqdm=False)
print(json.dumps([windows.calls, [list(output.outputs[0].token_ids) for output in outputs]]))
"""


def test_vllms_own_seeded_noise_gives_its_plain_tokens_in_fewer_calls(tmp_path):
    plain, window = (
        json.loads(run("-c", OWN_NOISE, str(tmp_path), str(size)).splitlines()[-1]) for size in (1, 8)
    )
    assert window[1] == plain[1] and len({tuple(tokens) for tokens in plain[1]}) == 3
    assert window[0] < 36 <= plain[0] <= 37  # the runner schedules ahead


ANY_MODEL = """
import json, pathlib, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder, window = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=63))
model.lm_head.weight.data.mul_(4)
model.save_pretrained(folder)
from vllm import LLM, SamplingParams
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.serving.request import settings_of
from visual_spec.serving.vllm.start import PROPOSER, windows_of
law = TokenLaw(guidance_scale=2.0, temperature=0.9, top_k=30)
prompts = [([5] * (3 + k) + [60 + k], [5, 7]) for k in range(3)]
drafts = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": window - 1}
engine = LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
             enable_prefix_caching=False, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=400,
             additional_config={"visual_spec": {"grid": [6, 6], "image_ids": [4, 60]}},
             **({"speculative_config": drafts} if window > 1 else {}))
windows = windows_of(engine.llm_engine.vllm_config)
windows.calls = 0
asked = [({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=36, detokenize=False, extra_args=extra))
         for k, pair in enumerate(prompts) for ids, extra in zip(pair, settings_of(law, k, str(k)))]
outputs = engine.generate([ids for ids, _ in asked], [params for _, params in asked], use_tqdm=False)
served, calls = [list(output.outputs[0].token_ids) for output in outputs], windows.calls
expected = []
for k, pair in enumerate(prompts):
    noise = CounterNoise(draw_keys([torch.Generator().manual_seed(k)], 1), "cpu")
    rows = [list(ids) for ids in pair]
    for slot in range(36):
        with torch.no_grad():
            logits = torch.cat([model(torch.tensor([row])).logits[:, -1:, 4:60] for row in rows])
        at = torch.tensor([[slot]])
        token = 4 + int(noise.categorical(law(logits, True, at), at, TOKEN))
        rows = [row + [token] for row in rows]
    expected += [rows[0][-36:]] * 2
print(json.dumps([calls, served == expected, len({tuple(tokens) for tokens in served})]))
"""


@pytest.mark.parametrize("window", [1, 8])
def test_any_model_of_vllm_draws_what_a_loop_over_its_own_logits_draws(window, tmp_path):
    """An ordinary Llama that is told which of its ids are a picture's; pairs have prompts of different lengths."""
    calls, equal, different = json.loads(run("-c", ANY_MODEL, str(tmp_path), str(window)).splitlines()[-1])
    assert equal and different == 3 and (calls < 36 if window > 1 else calls == 36)


BROKEN = """
import json, sys, torch
from vllm import LLM, SamplingParams
from visual_spec.pipelines.placing import load
from visual_spec.serving.request import settings_of
from visual_spec.serving.vllm.engine import engine_arguments, requests_of
from visual_spec.serving.vllm.folder import PromptIds, save_for_vllm
pipe = load("shapes", "cpu", "float32")
ids, law = PromptIds(pipe.transformer, pipe.text_encoder), pipe.make_law()
folder, window = save_for_vllm(pipe, sys.argv[1]), int(sys.argv[2])
engine = LLM(**engine_arguments(folder, requests=6, window=window, dtype="float32"))
good = requests_of(ids, "a large red circle", 3, law, 256, "good")
def alone(prompt, extra):
    params = SamplingParams(temperature=0, max_tokens=256, detokenize=False, extra_args=extra)
    return {"prompt_token_ids": prompt}, params
whole = good[0][0]["prompt_token_ids"]
asked = [alone(whole[:5], {"seed": 1}), *good, alone(whole + whole[:1], {"seed": 1}),
         alone(whole, settings_of(law, 1, "lonely")[0])]
outputs = engine.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
tokens = [list(output.outputs[0].token_ids) for output in outputs]
drawn = pipe("a large red circle", generator=torch.Generator().manual_seed(3), output_type="latent")
expected = drawn.tokens[0].tolist()
print(json.dumps([[len(own) for own in tokens], [own == expected for own in tokens]]))
"""


@pytest.mark.parametrize("window", [1, 32])
def test_a_request_that_cannot_be_drawn_ends_and_the_others_go_on(window, tmp_path):
    """A prompt too short, one too long, and a member of a pair alone: each ends at once, beside a good pair."""
    lengths, equal = json.loads(run("-c", BROKEN, str(tmp_path), str(window)).splitlines()[-1])
    assert lengths == [1, 256, 256, 1, 1] and equal == [False, True, True, False, False]
