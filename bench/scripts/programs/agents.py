"""stable-baselines3: an agent of the given algorithm, as its README starts one."""

import sys

import gymnasium
from stable_baselines3 import DQN, PPO, SAC

AGENTS = {"PPO": (PPO, "CartPole-v1"), "DQN": (DQN, "CartPole-v1"), "SAC": (SAC, "Pendulum-v1")}

agent, world = AGENTS[sys.argv[1]]
model = agent("MlpPolicy", gymnasium.make(world), verbose=1, device="cuda")
model.learn(total_timesteps=10_000, log_interval=4)
model.save("agent")
