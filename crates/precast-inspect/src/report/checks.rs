//! The report's section on checks: findings with fixes, intended findings with reasons, and open questions.

use maud::{Markup, html};
use precast_builder::protocol::{Finding, Severity};

use super::table::heads;
use crate::checks::{self, Checks, FindingRow};

pub(super) fn checks(all: &[Checks]) -> Markup {
    html! {
        h2 #check { "What checks found" }
        @if all.is_empty() {
            p.soft { "No check was given. " code { "precast check --format json > check.json" } " makes one; "
                code { "precast report --check check.json" } " adds it." }
        }
        @for (index, checks) in all.iter().enumerate() { (one(index, checks)) }
    }
}

fn one(index: usize, checks: &Checks) -> Markup {
    let rows = checks::rows(&checks.modules);
    let (allowed, open): (Vec<&FindingRow<'_>>, Vec<&FindingRow<'_>>) =
        rows.iter().partition(|row| row.finding.allowed.is_some());
    html! {
        h3 { (checks.model) }
        @if open.is_empty() { p { "Nothing is found that is not intended." } }
        @else {
            div.scroll { table.sort id=(format!("check-{index}")) {
                (heads(&[("Severity", false), ("Finding", false), ("Where", false), ("Modules", false), ("Why", false)]))
                tbody { @for row in &open { tr {
                    td class=[(row.finding.severity == Severity::High).then_some("bad")] data-v=(row.finding.severity as u8) {
                        (row.finding.severity.word())
                    }
                    td { (row.finding.category) }
                    td { (place(row.finding)) }
                    td { (row.modules.join(", ")) }
                    td.wrap { (row.finding.why) (fix(row.finding)) }
                } } }
            } }
        }
        @if !allowed.is_empty() {
            h4 { "Intended" }
            div.scroll { table {
                thead { tr { @for name in ["Finding", "Where", "Reason"] { th scope="col" { (name) } } } }
                tbody { @for row in allowed { tr {
                    td { (row.finding.category) }
                    td { (place(row.finding)) }
                    td.wrap { (row.finding.allowed.as_deref().unwrap_or_default()) }
                } } }
            } }
        }
        @for module in checks.modules.iter().filter(|module| !module.checked.unknown.is_empty()) {
            h4 { "Not known of " (module.module) }
            ul { @for unknown in &module.checked.unknown { li { (unknown) } } }
        }
    }
}

fn place(finding: &Finding) -> Markup {
    html! {
        @if let Some(location) = &finding.location { code { (location) } }
        @if let Some(function) = &finding.function { br; span.soft { (function) } }
    }
}

fn fix(finding: &Finding) -> Markup {
    html! {
        @if let Some(source) = &finding.source { br; code { (source) } }
        br; span.soft { (finding.fix.text) }
        @for line in &finding.fix.lines { br; code.good { (line) } }
    }
}
