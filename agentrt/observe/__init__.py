"""What a node tells operators about itself: counts, durations, targets, and how they are shown. Pure but for the log
handler: who feeds it and who serves it is the engine's and the HTTP API's business."""
