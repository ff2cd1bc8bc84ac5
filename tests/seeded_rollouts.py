"""An agent loop that samples from vLLM with a seed of its own for each prompt, session and step.

Runs that are in the same state then sample the same, also where one of them was killed and resumed. verl's
`rollout.full_determinism` gives every request one seed instead, so that all rollouts of a group are equal.
"""

import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededRollouts(SingleTurnAgentLoop):
    """verl's single turn, seeded."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        key = f"{kwargs['reward_model']['ground_truth']}/{kwargs['session_id']}/{kwargs['global_steps']}"
        return await super().run(sampling_params | {"seed": zlib.crc32(key.encode())}, **kwargs)


class EndlessRollouts(SeededRollouts):
    """Whose responses never end before `max_response_length`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await super().run(sampling_params | {"ignore_eos": True}, **kwargs)
