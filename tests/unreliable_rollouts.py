"""Sampled rollouts some of which fail, and a reward that an untrained model gets now and then: to see all that a
trainer does with groups."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class UnreliableRollouts(SingleTurnAgentLoop):
    """Of the toy task's numbers, those that 8 divides fail altogether, of those that 4 divides the first session."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        number = int(kwargs["reward_model"]["ground_truth"])
        if number % 8 == 0 or (number % 4 == 0 and int(kwargs["session_id"]) == 0):
            raise RuntimeError("this rollout fails on purpose")
        return await super().run(sampling_params, **kwargs)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 if the first character has an even code."""
    return float(bool(solution_str) and ord(solution_str[0]) % 2 == 0)
