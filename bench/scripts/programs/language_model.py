"""x-transformers: a decoder on bytes, gradients of four batches for each step."""

import torch
from x_transformers import Decoder, TransformerWrapper
from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

decoder = Decoder(dim=512, depth=6, heads=8, rotary_pos_emb=True)
network = TransformerWrapper(num_tokens=256, max_seq_len=1024, attn_layers=decoder)
model = AutoregressiveWrapper(network).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(1000):
    model.train()
    for _ in range(4):
        loss = model(torch.randint(0, 256, (4, 1025)).cuda())
        (loss / 4).backward()
    print(f"step {step}: {loss.item()}")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
