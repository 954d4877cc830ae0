"""What tests share: made-up inputs, plain references and small worlds to run them in.

Test files import from here and never from each other. Shared by every room: this
folder; `engine`: real engines and the oracles that judge them; `worker`: caches and
batches without an engine; `attention`: attention layers and other implementations to
compare with; `servers`: HTTP servers, real and fake.
"""
