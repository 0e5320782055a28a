//! The report in a real browser: it renders, filters and sorts, with no console messages and no network requests.

use std::{fs, path::Path, process::Command};

use crate::sample;

/// A user's actions on the page; the answers go to its title.
const ACTIONS: &str = r##"<script>
addEventListener("load", () => {
  const facts = [];
  const rows = (id) => [...document.getElementById(id).tBodies[0].rows];
  const shown = (id) => rows(id).filter((row) => row.offsetParent !== null).length;
  facts.push(`charts=${[...document.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().height > 40).length}`);
  facts.push(`rows=${shown("programs-0")}`);
  const input = document.querySelector("input[data-table=programs-0]");
  const type = (text) => { input.value = text; input.dispatchEvent(new Event("input")); };
  type("seq=128 enc");
  facts.push(`filtered=${shown("programs-0")} "${input.parentElement.querySelector("output").textContent}"`);
  type("");
  const size = () => rows("programs-0").map((row) => row.cells[5].textContent).join(",");
  const button = document.querySelectorAll("#programs-0 th button")[5];
  button.click();
  facts.push(`up=${size()}`);
  button.click();
  facts.push(`down=${size()} ${document.querySelectorAll("#programs-0 th")[5].getAttribute("aria-sort")}`);
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  facts.push(`overflow=${wide}`);
  facts.push(`fetched=${performance.getEntriesByType("resource").length}`);
  document.title = "FACTS " + facts.join("; ");
});
addEventListener("securitypolicyviolation", (event) => { console.error("violation " + event.blockedURI); });
</script></body>"##;

fn chromium() -> Option<&'static str> {
    let mut names = ["chromium", "chromium-browser", "google-chrome"].into_iter();
    names.find(|name| {
        let output = Command::new(name).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    })
}

fn browse(browser: &str, dir: &Path, page: &Path, extra: &[&str]) -> (String, String) {
    let options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
                   --disable-component-update --enable-logging=stderr --virtual-time-budget=5000 --dump-dom";
    let output = Command::new(browser)
        .args(options.split(' '))
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .args(extra)
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_report_works_in_a_browser() {
    let Some(browser) = chromium() else {
        eprintln!("skipped: no chromium");
        return;
    };
    let sample = sample::sample();
    let page = sample.dir.path().join("report.html");
    let counts = sample::counts(sample.dir.path());
    let mut report = Command::new(env!("CARGO_BIN_EXE_precast"));
    report.arg("report").arg("--store").arg(&sample.path);
    report.arg("--counts").arg(counts).arg("-o").arg(&page);
    assert!(report.status().unwrap().success());
    let html = fs::read_to_string(&page).unwrap();
    // Text of a model must not become markup, and the page refers to nothing outside.
    for text in [
        "<script>alert",
        "http://",
        "https://",
        "src=",
        "@import",
        "url(",
    ] {
        assert!(!html.contains(text), "{text}");
    }
    fs::write(&page, html.replace("</body>", ACTIONS)).unwrap();
    let (light, dark) = (
        "--hide-scrollbars",
        "--blink-settings=preferredColorScheme=0",
    );
    for (theme, size) in [(light, "1100,900"), (dark, "1100,900"), (light, "390,800")] {
        let extra = [theme, &format!("--window-size={size}")];
        let (dom, log) = browse(browser, sample.dir.path(), &page, &extra);
        let title = dom.split("<title>").nth(1);
        let facts = title
            .and_then(|rest| rest.split("</title>").next())
            .unwrap_or(&dom);
        assert_eq!(
            facts,
            "FACTS charts=3; rows=3; filtered=1 \"1 of 3\"; up=7.81 KiB,17.2 KiB,23.4 KiB; \
             down=23.4 KiB,17.2 KiB,7.81 KiB descending; overflow=false; fetched=0",
            "{theme} {size}"
        );
        let messages = log.lines().filter(|line| line.contains("CONSOLE"));
        let messages: Vec<&str> = messages.collect();
        assert!(messages.is_empty(), "{messages:?}");
    }
}
