"""This package is the data pipeline, from the files to the batches.

The steps that read take the same ``StreamOptions``.

The run has S *slots* (``stream.slots``), which are streams of documents. Every global
batch takes the same number of sequences from each. A rank reads a contiguous range of
slots. An *epoch* of a slot is one time through its share of the documents; a *pass* is
one sequential read of a file. A *source* is a data set with a weight
([[stream.sources]]). A *position* of a slot is the integers (``position.Field``) from
which a resumed run continues::

    sources       the data sets that the config names, and a look at their first
      │           documents
      ▼
    listing       their files, listed once on rank 0: local_files, hub (Hugging Face),
      │           mirror (a local copy of the hub's), objects (an object store)
      ▼
    assignment    which slot reads which documents of these files
      │
      ▼
    documents     the documents of one file: storage reads its bytes, formats and
      │           token_ids find the documents
      ▼
    passes        one pass over a file serves all slots of a rank; position: where each
      │           slot is
      ▼
    cursor        the documents of a slot, one after another, without bad ones; shuffle:
      │           the same, shuffled in windows
      ▼
    stream        the slots of a rank: documents are tokenized ahead (tokenizer) and
      │           packed into sequences, in a process of their own
      ▼
    loader        TorchTitan's dataloader; validation: the first sequences of the
                  validation split; fingerprint: what a checkpoint must agree with

Beside the road is hf_tokenizer (a model's tokenizer for export). The commands that
write data (fetch, indexing, sample) are in ``titan_disp.lab``.
"""
