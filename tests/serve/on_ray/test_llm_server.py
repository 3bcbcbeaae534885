"""Ray Serve LLM with Penstock as its engine: the ingress, the types and the handles are Ray's."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (Ray is an extra.)

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from ray_cluster import ray_serve
from serve.demo import demo_path

ray = pytest.importorskip("ray", reason="needs the extra ray")
llm = pytest.importorskip(
    "ray.serve.llm", reason="needs vLLM or SGLang, for the types of Ray Serve LLM's requests", exc_type=ImportError
)
pytest.importorskip("python_multipart", reason="Ray Serve LLM needs python-multipart")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own code
]
PROMPT = "Explain the options of a server."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from ray import serve

    configs = [
        llm.LLMConfig(
            model_loading_config={"model_id": name, "model_source": demo_path()},
            server_cls="serve.on_ray.llm_server.PenstockServer",
            engine_kwargs={"random_seed": seed, "skip_server_warmup": True},
            deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
        )
        for seed, name in enumerate(("first", "second"), 1)
    ]
    with ray_serve(num_cpus=8) as url:
        serve.run(llm.build_openai_app({"llm_configs": configs}))
        yield url


async def test_ray_serves_penstock_by_its_own_ingress(url: str) -> None:
    from ray import serve

    from serve import Engine

    sampling = {"max_new_tokens": 16, "temperature": 0}
    async with Engine(random_seed=1) as engine:
        reference = (await engine.generate(PROMPT, sampling))["text"]
        vector = (await engine.encode(PROMPT))["embedding"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        try:
            names = [card.id async for card in client.models.list()]
        except openai.BadRequestError as error:
            if "('query', 'self')" in str(error):  # Ray's own route, before Penstock is asked
                pytest.skip("this FastAPI is too new for Ray Serve's ingress; 0.133 works with Ray 2.60")
            raise
        assert names == ["first", "second"]
        for model in ("first", "second"):
            answer = await client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0)
            assert answer.choices[0].text == reference
            assert answer.model == model
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
        events = await client.completions.create(
            model="first", prompt=PROMPT, max_tokens=16, temperature=0, stream=True
        )
        assert "".join([event.choices[0].text async for event in events if event.choices]) == reference

        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
        chat = await client.chat.completions.create(model="first", messages=messages, max_tokens=8, temperature=0)
        parts = await client.chat.completions.create(
            model="first", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        text = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
        assert text == chat.choices[0].message.content

        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="first", prompt=PROMPT, max_tokens=-5)
        vectors = await client.embeddings.create(model="first", input=PROMPT)
        assert vectors.data[0].embedding == pytest.approx(vector, abs=1e-5)

        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            tokens = (await http.post("/tokenize", json={"model": "first", "prompt": PROMPT})).json()["tokens"]
            text = (await http.post("/detokenize", json={"model": "first", "tokens": tokens})).json()
            assert PROMPT in (text.get("prompt") or text.get("text"))  # vLLM's name of the field, or SGLang's

        handle = serve.get_deployment_handle("PenstockServer:first", "default")
        await handle.reset_prefix_cache.remote()
        await handle.pause.remote(mode="keep", clear_cache=True)
        assert await handle.is_paused.remote()
        await handle.resume.remote()
        assert not await handle.is_paused.remote()
        assert not await handle.is_sleeping.remote()
        again = await client.completions.create(model="first", prompt=PROMPT, max_tokens=16, temperature=0)
        assert again.choices[0].text == reference


def test_settings_without_effect_are_refused() -> None:
    from runtime.errors import ConfigurationError
    from serve.on_ray.llm_server import words_of_config

    config = llm.LLMConfig(
        model_loading_config={"model_id": "m", "model_source": "/m", "tokenizer_source": "t"},
        engine_kwargs={"tp_size": 2},
    )
    words = ["--model-path", "/m", "--served-model-name", "m", "--tokenizer-path", "t", "--tp-size", "2"]
    assert words_of_config(config) == words
    for field in ({"placement_group_config": {"bundle_per_worker": {"CPU": 1}}}, {"lora_config": {}}):
        with pytest.raises(ConfigurationError, match=next(iter(field))):
            words_of_config(config.model_copy(update=field))
