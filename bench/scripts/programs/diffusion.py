"""denoising-diffusion-pytorch: the trainer of its README on a folder of pictures."""

import sys

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

if __name__ == "__main__":
    network = Unet(dim=64, dim_mults=(1, 2, 4, 8), flash_attn=True)
    diffusion = GaussianDiffusion(network, image_size=128, timesteps=1000, sampling_timesteps=250)
    Trainer(
        diffusion,
        sys.argv[1],
        train_batch_size=16,
        train_lr=8e-5,
        train_num_steps=700_000,
        gradient_accumulate_every=2,
        ema_decay=0.995,
        amp=True,
        calculate_fid=False,
    ).train()
