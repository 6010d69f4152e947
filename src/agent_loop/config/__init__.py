"""Settings of a run, from YAML and `key=value` overrides.

Unknown keys and invalid values are refused before the run starts.
"""

from agent_loop.config.algorithm import AlgorithmConfig
from agent_loop.config.data import DataConfig
from agent_loop.config.distillation import DistillationConfig, Objective, TeacherConfig
from agent_loop.config.load import load_config
from agent_loop.config.model import ModelConfig
from agent_loop.config.optim import ActorConfig, CorrectionConfig, CriticConfig, OptimConfig
from agent_loop.config.placement import PlacementConfig, SplitConfig
from agent_loop.config.reward import RewardConfig
from agent_loop.config.rollout import (
    AgentConfig,
    CustomServerConfig,
    MultiTurnConfig,
    RolloutConfig,
    TraceConfig,
    ValSamplingConfig,
)
from agent_loop.config.sampler import SamplerConfig
from agent_loop.config.sft import SftConfig
from agent_loop.config.trainer import RayConfig, TrainerConfig
from agent_loop.config.validation import all_keys, parse_options, parse_section, parse_value
from agent_loop.config.values import (
    LOWEST_TEMPERATURE,
    MAX_SAMPLES,
    MOST,
    AggregationMode,
    Beta,
    Coefficient,
    Divergence,
    KLEstimator,
    LearningRate,
    Level,
    Logger,
    Name,
    NotNegative,
    OnWeightUpdate,
    Positive,
    PositiveSeconds,
    Replicas,
    Samples,
    Section,
    Seed,
    Share,
    Temperature,
    Tokens,
    TopK,
    TopP,
    TraceBackend,
    WeightTransfer,
)
from agent_loop.config.whole import Config

__all__ = [
    "LOWEST_TEMPERATURE",
    "MAX_SAMPLES",
    "MOST",
    "ActorConfig",
    "AgentConfig",
    "AggregationMode",
    "AlgorithmConfig",
    "Beta",
    "Coefficient",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "CustomServerConfig",
    "DataConfig",
    "DistillationConfig",
    "Divergence",
    "KLEstimator",
    "LearningRate",
    "Level",
    "Logger",
    "ModelConfig",
    "MultiTurnConfig",
    "Name",
    "NotNegative",
    "Objective",
    "OnWeightUpdate",
    "OptimConfig",
    "PlacementConfig",
    "Positive",
    "PositiveSeconds",
    "RayConfig",
    "Replicas",
    "RewardConfig",
    "RolloutConfig",
    "SamplerConfig",
    "Samples",
    "Section",
    "Seed",
    "SftConfig",
    "Share",
    "SplitConfig",
    "TeacherConfig",
    "Temperature",
    "Tokens",
    "TopK",
    "TopP",
    "TraceBackend",
    "TraceConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "WeightTransfer",
    "all_keys",
    "load_config",
    "parse_options",
    "parse_section",
    "parse_value",
]
