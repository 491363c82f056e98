"""wandb and TensorBoard beside PyTorch's profiler and its gradient scaler."""

import torch
import wandb
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.tensorboard import SummaryWriter

wandb.init(project="logged", config={"width": 512})
writer = SummaryWriter()
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
wandb.watch(model, log="all")
with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=1, active=2),
    on_trace_ready=tensorboard_trace_handler("traces"),
    profile_memory=True,
    with_stack=True,
) as profiler:
    for step in range(100):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 512, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        wandb.log({"loss": loss.item(), "weights": wandb.Histogram(model.weight.detach().cpu())})
        writer.add_scalar("loss", loss, step)
        writer.add_histogram("weights", model.weight, step)
        profiler.step()
writer.close()
wandb.finish()
