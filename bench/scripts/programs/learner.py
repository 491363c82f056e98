"""fastai: a vision learner in mixed precision on a folder of pictures, as its quick start shows."""

import sys

from fastai.vision.all import ImageDataLoaders, Resize, accuracy, resnet34, vision_learner

if __name__ == "__main__":
    loaders = ImageDataLoaders.from_folder(
        sys.argv[1], train="train", valid="val", item_tfms=Resize(224), bs=32
    )
    learner = vision_learner(loaders, resnet34, metrics=accuracy, pretrained=False).to_fp16()
    learner.fine_tune(2)
