"""The data inside a report page, for tests."""

import base64
import gzip
import html
import json
import re


def pieces(path):
    """Return the manifest of a page and its data by name."""
    text = path.read_text()
    found = re.findall(r'<script type="application/octet-stream" data-piece="([^"]*)">([^<]*)</script>', text)
    begin = json.loads(
        re.search(r'<script type="application/json" id="begin">(.*?)</script>', text, re.DOTALL)[1]
    )
    unpacked = {html.unescape(n): json.loads(gzip.decompress(base64.b64decode(d))) for n, d in found}
    return begin["manifest"], unpacked
