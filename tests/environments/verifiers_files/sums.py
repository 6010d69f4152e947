"""Environment of verifiers with tasks and scorers of reasoning-gym: one prompt, one reply."""

import reasoning_gym
import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    dataset: str = "chain_sum"
    size: int = 4
    seed: int = 1
    min_terms: int = 2
    max_terms: int = 6


class SumData(vf.TaskData):
    entry: dict


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def score_answer(self, trace) -> float:
        name = self.data.entry["metadata"]["source_dataset"]
        return reasoning_gym.get_score_answer_fn(name)(trace.last_reply, self.data.entry)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        config = self.config
        options = config.model_dump(include={"size", "seed", "min_terms", "max_terms"})
        for entry in reasoning_gym.create_dataset(config.dataset, **options):
            yield Sum(SumData(prompt=entry["question"], entry=entry), config.task)


__all__ = ["Sums"]
