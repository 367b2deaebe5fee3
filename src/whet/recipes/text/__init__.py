"""The text recipe: train text classifiers with `whet train text`.

recipe            the recipe, which connects the modules below
config            options, and the workload that they describe
corpus            labeled texts, splits and class weights
corpus_reader     reads a corpus from files
embedded          the default dataset, which consists of docstrings of installed libraries
readers/          rows of CSV, TSV, JSON lines, Parquet, Arrow and class folders
data_report/      checks of labeled texts (`whet data text`)
data              tokenized splits
tokenizer         byte-level BPE, and tokenizers of pretrained models
attention, model  the small encoder
backbone          files and sizes of pretrained models
bert, pretrained  BERT without padding, other classifiers of transformers, freezing and LoRA
factory           creates the tokenizer and model of a config or a saved run
evaluation        loss and metrics
prediction, prediction_files     predictions for texts, and for the rows of a file
export            transformers folders and ONNX files
"""
