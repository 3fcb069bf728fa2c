"""A headless Chromium for tests of pages: Debian's packages ``chromium`` and ``chromium-driver``.

``.ci/run`` installs them and sets ``NEEDS_CHROMIUM``: then a test without a browser fails instead of being skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains

NEEDED = "NEEDS_CHROMIUM"


class Browser:
    """One page at a time, with its console messages and requests."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, fragment: str = "", *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a page anew, from disk."""
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))

    def run(self, script: str, *arguments: object) -> Any:
        """Runs a script and returns its result."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str) -> Any:
        """Runs a script that passes its result to the function ``done``, its last argument."""
        failed = "addEventListener('error', (event) => done(event.message));"
        return self.driver.execute_async_script(f"const done = arguments[arguments.length - 1]; {failed} {script}")

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, in the focused element."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()
        self.wait("requestAnimationFrame(() => requestAnimationFrame(done))")

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        """Clicks the first element that matches."""
        self.driver.find_element("css selector", selector).click()
        self.wait("requestAnimationFrame(() => requestAnimationFrame(done))")

    def measure(self) -> None:
        """Starts to measure the processor time of pages, see ``seconds``."""
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds(self) -> float:
        """The processor time that the page took since it was opened: loading, scripts, layout, painting."""
        found = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(item["value"] for item in found if item["name"] == "TaskDuration"))

    def complaints(self) -> list[str]:
        """The errors in the console since the page was opened, including violations of its security policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The URLs that the page loaded since it was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def start_browser() -> Iterator[Browser]:
    """A browser, closed when the tests end; skips the test if there is none."""
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        message = "no Chromium here: apt-get install chromium chromium-driver"
        if os.environ.get(NEEDED):
            pytest.fail(message)
        pytest.skip(message)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    for argument in ("--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows"):
        options.add_argument(argument)  # else a page that is thought hidden draws no frames
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    driver.set_script_timeout(60)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
