"""A headless Chromium, driven by Selenium, for tests of pages."""

import shutil
import time
from contextlib import contextmanager

import pytest

_READY_S = 900.0


@contextmanager
def chromium(*, width=1400, height=1000):
    """Skip the test if Chromium or its driver is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (make setup)")
    from selenium.webdriver.chrome.service import Service

    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver here; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                     f"--window-size={width},{height}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        browser.set_script_timeout(_READY_S)
        yield Page(browser)
    finally:
        browser.quit()


class Page:
    """Queries and actions on the open page."""

    def __init__(self, browser):
        self.browser = browser

    def open(self, url):
        self.browser.get(url)
        self.until("document.body.dataset.ready === 'yes'")
        return self

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def get(self, expression, *arguments):
        return self.run(f"return {expression}", *arguments)

    def until(self, expression, *arguments):
        """Wait until a JavaScript expression is true. Raises AssertionError with the console's messages."""
        end = time.monotonic() + _READY_S
        while not self.get(expression, *arguments):
            assert time.monotonic() < end, f"never: {expression}; console: {self.console()}"
            time.sleep(0.02)

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def set(self, selector, value):
        """Enter the value as a person would, and fire the events."""
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true}))",
            selector, value,
        )  # fmt: skip

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector):
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
        )

    def console(self):
        """Return errors and warnings since the last call, except those that reading pixels causes."""
        found = [line for line in self.browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
        return [line for line in found if "willReadFrequently" not in line["message"]]
