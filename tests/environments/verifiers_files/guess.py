"""Environment of verifiers with several turns: the player guesses a number and is told whether it is higher."""

import os
import signal

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class Guess(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def num_guesses(self, trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in (3, 7):
            yield Guess(
                GuessData(
                    number=number, prompt="Guess my number, from 1 to 9.", system_prompt="Say a number."
                ),
                self.config.task,
            )


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        found = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                if segment.last_reply == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                guess = int(segment.last_reply)  # a reply without a number is an error of this environment
                if guess == task.data.number:
                    found = True
                    break
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")
        interaction.trace.record_reward("found", float(found), 0.5)


__all__ = ["GuessEnv", "GuessTaskset"]
