"""What fits agent_loop to other libraries."""
