"""The engine: runs a loaded model for many callers at once.

engine.py        Engine, the public class: loading, conversations; start reading here
text_engine.py   generations: text in, text out
logits_engine.py token ids in, logits out; the KV cache; measurements
chat.py          a conversation: messages in, streamed answers out

Steps. A step computes rows for several answers together (devices/__init__.py):

step_loop.py     lets any number of threads share the steps of an engine
steps.py         one step: plan, start, complete, distribute the results
scheduler.py     which requests and tokens the next step computes; admission.py: which requests have pages of the cache
runner.py        runs a planned step on the device; functions.py: which function of the plan computes it
sampled_rows.py  the io buffers by which the device chooses tokens
guessing.py      speculation: guesses before a step, what became of them after it
encoding.py      images are encoded between steps

requests.py      a request: what the scheduler knows of an answer or a scoring; client_queues.py: waiting requests
answers.py       an answer: from tokens to pieces of text
generations.py   iterators over the pieces of answers; generation.py: their arguments and results
token_scores.py  log-probabilities of a prompt's tokens
batch.py         steps without the scheduler, for logits and measurements
encoder.py       embedding and ranking models

The cache on disk: stored_pages.py (what is kept), page_writer.py (writes it), restoring.py (reads it).
"""
