//! A finding of a check as text.

use owo_colors::OwoColorize;

use super::text::plain;
use crate::build::protocol::Finding;

/// Returns the lines of a finding.
pub(super) fn finding(finding: &Finding) -> Vec<String> {
    let place = finding.location.iter();
    let place: String = place.map(|place| format!("{}: ", plain(place))).collect();
    let (category, why) = (finding.category.bold(), plain(&finding.why));
    let mut lines = vec![format!("{place}{category}: {why}")];
    lines.extend((finding.source.iter()).map(|source| format!("    {}", plain(source))));
    let fix = plain(&finding.fix.text);
    lines.push(format!("  {} {fix}", "fix:".cyan().bold()));
    let fixed = finding.fix.lines.iter();
    lines.extend(fixed.map(|line| format!("    {}", plain(line).green())));
    lines
}
