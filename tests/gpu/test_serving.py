"""A served engine on the device: the host never waits for it, memory is freed, and lack of memory fails one request
only.
"""

from __future__ import annotations

from typing import Any

import pytest

KEPT_BYTES = 50 * 2**20


@pytest.mark.parametrize("options", [{}, {"sampling_backend": "pytorch"}, {"disable_cuda_graph": True}])
async def test_nothing_waits_for_the_device_in_a_whole_session(options: dict[str, Any], device: str) -> None:
    import tiny_models
    from on_device import session
    from on_device.graphs import prepared
    from serve import Engine

    if device == "cpu" and options:
        pytest.skip("neither Triton's kernels nor CUDA graphs are on a CPU")
    async with Engine(tiny_models.cached(), device=device, **session.OPTIONS, **options) as engine:
        if device != "cpu":
            await session.run(engine)  # compiles kernels and captures graphs, where waiting is allowed
            await prepared(engine)
        with session.no_waiting(device):
            await session.run(engine)


async def test_a_step_that_waits_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_models
    from on_device import session
    from runtime.errors import StepFailed
    from runtime.worker.sampler import Sampler
    from serve import Engine

    if device == "cpu":
        pytest.skip("there is nothing to wait for on a CPU")
    sample = Sampler.sample

    def waiting(self: Sampler, logits: Any, *rest: Any) -> Any:
        logits.sum().item()
        return sample(self, logits, *rest)

    async with Engine(tiny_models.cached(), device=device, **session.OPTIONS) as engine:
        monkeypatch.setattr(Sampler, "sample", waiting)
        await engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4})
        with session.no_waiting(device), pytest.raises(StepFailed):
            await engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4})


async def test_layers_in_host_memory_give_the_same_tokens(device: str) -> None:
    import tiny_checkpoints
    from serve import Engine

    if device == "cpu":
        pytest.skip("all layers are in host memory on a CPU")
    path, outputs = tiny_checkpoints.cached("llama", num_hidden_layers=6), []
    prompts = [[3 + (7 * i + j) % 50 for j in range(5 + 9 * i)] for i in range(6)]
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 1024, "device": device}
    for more in ({}, {"offload_group_size": 1}, {"offload_group_size": 1, "disable_cuda_graph": True}):
        async with Engine(path, **options, **more) as engine:
            for _ in range(3):  # graphs are captured between steps
                answers = await engine.generate(input_ids=prompts, sampling_params=greedy)
                outputs.append([answer["output_ids"] for answer in answers])
    assert outputs == outputs[:1] * len(outputs)


async def test_many_engines_leave_the_memory_as_they_found_it(device: str) -> None:
    import tiny_models
    from on_device.memory import after_cycles

    cycles = 5 if device == "cpu" else 21  # fewer in a rehearsal
    first, *_, last = await after_cycles(cycles, tiny_models.cached(), device, max_total_tokens=65_536)
    assert last - first < KEPT_BYTES


async def test_a_step_without_memory_costs_the_newest_request_alone(device: str) -> None:
    from on_device.memory import check_starving

    await check_starving(device)


async def test_the_device_tells_how_long_it_is_busy(device: str) -> None:
    from on_device.busy import shares_of_a_session

    shares = await shares_of_a_session(device)
    assert len(shares) > 100
    assert all(0 < share <= 1 for share in shares)
    assert sum(shares) / len(shares) > 0.05
