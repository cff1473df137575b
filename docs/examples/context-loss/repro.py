"""One fact at each length: is it found? Usage: python repro.py URL MODEL  (key: variable API_KEY)"""
import json, os, random, sys, urllib.request

if len(sys.argv) != 3:
    sys.exit(__doc__)
url, model = sys.argv[1].rstrip("/").removesuffix("/v1"), sys.argv[2]
for words in (816, 1136, 1600, 2256, 3152, 4416, 6192):
    draw = random.Random(words)
    value = str(draw.randrange(10000, 99999))
    lines = [f"Item {i}: shelf {draw.randrange(999)}, count {draw.randrange(99)}." for i in range(words // 14)]
    lines.insert(int(0.6 * len(lines)), f"The access code is {value}.")
    question = " ".join(lines) + " What is the access code? Answer with the number only."
    body = {"model": model, "temperature": 0, "max_tokens": 16, "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json"}
    if os.environ.get("API_KEY"):
        headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        reply = json.load(urllib.request.urlopen(request, timeout=600))
    except (OSError, ValueError) as error:
        sys.exit(f"no answer at about {words} tokens: {error}")
    answer = reply["choices"][0]["message"]["content"] or ""
    print(reply["usage"]["prompt_tokens"], "found" if value in answer else f"lost: {answer[:60]!r}", flush=True)
