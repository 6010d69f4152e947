"""Environment of verifiers with tools, which run in a server of their own."""

import verifiers.v1 as vf
from pydantic import Field

PRICES = {"pear": 3, "plum": 4}


class ShopState(vf.State):
    asked: list[str] = Field(default_factory=list)


class ShopTools(vf.Toolset[vf.ToolsetConfig, ShopState]):
    TOOL_PREFIX = None

    @vf.tool
    async def price_of(self, fruit: str) -> str:
        """Return the price of a fruit."""
        self.state.asked = [*self.state.asked, fruit]
        return str(PRICES[fruit])


class ShopConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Shop(vf.Task[vf.TaskData, ShopState, ShopConfig]):
    @classmethod
    def toolsets(cls, config):
        return [ShopTools(config.tools)]

    @vf.reward(weight=2.0)
    async def is_right(self, trace) -> float:
        return float(trace.last_reply == str(sum(PRICES.values())))

    @vf.metric
    async def num_prices(self, trace) -> float:
        return float(len(trace.state.asked))


class ShopTasksetConfig(vf.TasksetConfig):
    task: ShopConfig = ShopConfig()


class ShopTaskset(vf.Taskset[Shop, ShopTasksetConfig]):
    def load(self):
        yield Shop(vf.TaskData(prompt="What do a pear and a plum cost together?"), self.config.task)


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    ShopTools.run()
