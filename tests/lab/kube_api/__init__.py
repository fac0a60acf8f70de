"""A Kubernetes API server for tests: nodes, and as much of pods and events as a flannel daemon needs.

It speaks as kube-apiserver 1.36 does, to the chunk; ``tests/unit/subnet/kube/test_api.py`` compares it with a
recording. What it leaves out: ``metadata.managedFields`` of its own, protobuf and tables, HTTP/2, JSON patch,
and all validation that a flannel daemon cannot run into. It runs as a process of its own in the lab
(``tests.lab.kube``) or in the process of a test (``tests.local_kube``); ``Control`` is what tests ask of it.

- ``refusals``: the errors, as ``Status`` objects
- ``patches``: strategic merge and merge patch (pure)
- ``nodes``: the shape of a Node and what may become of it (pure)
- ``crowd``: large nodes in large numbers
- ``store``: objects, resource versions, history
- ``access``: who may do what
- ``api``: from a request to its answer
- ``lists``, ``watch``: the two long answers
- ``faults``, ``wire``: HTTP as Go's server writes it, and how it breaks
- ``server``: connections, and what is noted of requests
- ``control``, ``calls``: what tests may ask of it, and how from another process
"""
