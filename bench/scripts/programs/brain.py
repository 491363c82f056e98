"""speechbrain: its Brain trains a CRDNN on features of speech with CTC, in mixed precision."""

import speechbrain
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.losses import ctc_loss
from torch.utils.data import DataLoader, Dataset

TOKENS = 40


class Speech(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.randn(48_000), torch.randint(1, TOKENS, (30,))


class Recognizer(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        waves, _ = batch
        features = self.modules.features(waves.to(self.device))
        return self.modules.head(self.modules.encoder(features)).log_softmax(-1)

    def compute_objectives(self, predictions, batch, stage):
        tokens = batch[1].to(self.device)
        whole = torch.ones(len(tokens), device=self.device)
        return ctc_loss(predictions, tokens, whole, whole, blank_index=0)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        print(stage, epoch, stage_loss)


encoder = CRDNN(input_shape=[None, None, 40], rnn_layers=2, rnn_neurons=256, dnn_neurons=256)
brain = Recognizer(
    {"features": Fbank(), "encoder": encoder, "head": Linear(TOKENS, input_size=256)},
    lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    run_opts={"device": "cuda", "precision": "fp16"},
)
loader = DataLoader(Speech(), batch_size=8)
brain.fit(range(10), loader, valid_set=DataLoader(Speech(), batch_size=8))
