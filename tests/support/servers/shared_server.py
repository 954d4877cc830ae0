"""Flags of the server that tests/serve/conftest.py starts, and what clients know."""

BUDGET, INTERVAL, BLOCK = 96, 48, 32
KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = f"""
kv-policy: ams-tova
kv-budget: {BUDGET}
kv-interval: {INTERVAL}
kv-events: always
dtype: float32
max-model-len: 2048
max-num-seqs: 16
kv-cache-memory-bytes: 8388608
enforce-eager: true
enable-prompt-tokens-details: true
served-model-name: tiny
api-key: {KEY}
kv-policy-config:
  '{{"allow": ["streaming", "chunk-keydiff", "ams-expected"], "expected_window": 40,
  "report_events": true, "hints": true}}'
"""
